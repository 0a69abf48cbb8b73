//! Check of `RAYON_NUM_THREADS`: rayon takes a value that is no number for none, and starts as many threads as asked.

use std::ffi::OsStr;
use std::thread::available_parallelism;

use comm::{Error, Result};

use crate::SpawnConfig;
use crate::environment::THREADS;

/// So many threads may be asked for on any machine; on larger ones [`THREADS_PER_CORE`] for each core.
const ALWAYS_ALLOWED: usize = 64;
/// More threads than cores only take turns.
const THREADS_PER_CORE: usize = 8;

/// Checks `RAYON_NUM_THREADS` in the environment of this process.
///
/// # Errors
/// [`Error::InvalidArgument`]: it is not a number, or 0, or many times more than this machine has cores.
///
/// ```
/// assert!(launch::check_threads().is_ok());
/// ```
pub fn check_threads() -> Result<()> {
    std::env::var_os(THREADS).map_or(Ok(()), |value| check(&value))
}

impl SpawnConfig {
    /// Checks the variable as the ranks get it.
    pub(super) fn check_threads(&self) -> Result<()> {
        match self.env.iter().rev().find(|(name, _)| name == THREADS) {
            Some((_, value)) => check(value),
            None => check_threads(),
        }
    }
}

fn check(value: &OsStr) -> Result<()> {
    let cores = available_parallelism().map_or(1, usize::from);
    let most = ALWAYS_ALLOWED.max(THREADS_PER_CORE * cores);
    let count = value.to_str().and_then(|value| value.trim().parse().ok());
    // An empty variable counts as unset.
    if value.is_empty() || count.is_some_and(|count: usize| (1..=most).contains(&count)) {
        return Ok(());
    }
    let cores = if cores == 1 { "1 core".to_string() } else { format!("{cores} cores") };
    let help = format!("give a number of threads from 1 to {most} (this machine has {cores}), or unset it");
    Err(Error::invalid(THREADS, value.to_string_lossy(), help))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_sensible_number_is_refused() {
        for sensible in ["", "1", " 8 ", "64"] {
            assert!(check(sensible.as_ref()).is_ok(), "{sensible}");
        }
        for wrong in ["0", "-1", "abc", "2.5", "100000", "99999999999999999999"] {
            let line = check(wrong.as_ref()).unwrap_err().to_string();
            assert!(line.starts_with(&format!("RAYON_NUM_THREADS: got {wrong}; give a number")), "{line}");
        }
    }

    #[test]
    fn what_the_ranks_would_get_is_checked() {
        let env = vec![(THREADS.into(), "many".into())];
        assert!(SpawnConfig { env, ..SpawnConfig::default() }.check().is_err());
    }
}
