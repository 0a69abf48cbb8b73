//! Random numbers from the operating system.

use comm::{Error, Result};

/// Returns `N` random bytes from the operating system, as hexadecimal digits.
pub(super) fn random_hex<const N: usize>() -> Result<String> {
    let mut bytes = [0_u8; N];
    getrandom::fill(&mut bytes).map_err(|e| Error::system("cannot make the job's secret", e))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
