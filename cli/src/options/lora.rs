//! The rank of adapters, which training and plans have.

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
