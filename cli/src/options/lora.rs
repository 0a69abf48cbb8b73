//! Checks of adapters, which training and plans have.

use std::fmt::Display;

use models::LoraConfig;

use crate::error::{Error, Result};

/// Checks the rank of adapters (`--lora-rank`).
pub(crate) fn check_rank(rank: usize) -> Result<()> {
    if rank <= LoraConfig::MAX_RANK {
        return Ok(());
    }
    let help = format!("give at most {}", LoraConfig::MAX_RANK);
    Err(Error::Option { option: "--lora-rank", got: rank.to_string(), help })
}

/// Refuses a layer that is given twice.
pub(crate) fn check_once<T: Display>(option: &'static str, patterns: &[(String, T)]) -> Result<()> {
    let is_again = |at: &usize| patterns[..*at].iter().any(|(before, _)| *before == patterns[*at].0);
    let Some((name, value)) = (0..patterns.len()).find(is_again).map(|at| &patterns[at]) else {
        return Ok(());
    };
    let help = format!("{name} is there twice: give it one number");
    Err(Error::Option { option, got: format!("{name}={value}"), help })
}
