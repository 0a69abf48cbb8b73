//! Checks that a launcher makes before it starts ranks: their environment variables, listener and meeting point.

use std::ffi::OsString;
use std::time::Duration;

use crate::rendezvous::opening::check_can_open;
use crate::{InitMethod, Result, TcpConfig};

/// Checks, before any work, what the ranks will use that this process is about to start on this host: the environment
/// variables that they read, and whether rank 0 can listen and open its meeting point. The meeting point is closed
/// again, and is not opened for `env://`. With one rank only the variables are checked.
///
/// # Errors
/// As [`TcpConfig::from_env_at`]; [`Error::Listen`](crate::Error::Listen).
///
/// ```
/// comm::launcher::check_for_ranks(2, None, None)?;
/// let nowhere = "file:///no/such/folder/meeting".parse()?;
/// assert!(comm::launcher::check_for_ranks(2, Some(nowhere), None).is_err());
/// # Ok::<(), comm::Error>(())
/// ```
pub fn check_for_ranks(
    world_size: usize,
    init_method: Option<InitMethod>,
    timeout: Option<Duration>,
) -> Result<()> {
    let given = init_method.map(|method| OsString::from(method.to_string()));
    let lookup = |name: &str| match name {
        // The values that `launch` sets for its ranks.
        "RANK" => Some("0".into()),
        "WORLD_SIZE" => Some(world_size.to_string().into()),
        "MASTER_ADDR" => Some("127.0.0.1".into()),
        "MASTER_PORT" => Some("1".into()),
        "GIRANDOLE_SECRET" => Some("1".repeat(64).into()),
        "GIRANDOLE_SECRET_FILE" => None,
        name if name.starts_with("GIRANDOLE_ELASTIC") || name == "GIRANDOLE_NEWCOMER" => None,
        "GIRANDOLE_INIT_METHOD" if given.is_some() => given.clone(),
        name => std::env::var_os(name),
    };
    let config = TcpConfig::from_lookup(&lookup, timeout)?;
    if world_size == 1 { Ok(()) } else { check_can_open(&config) }
}
