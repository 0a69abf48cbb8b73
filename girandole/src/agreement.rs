//! Agreement of ranks: an error of one becomes an error of all.

use comm::{Communicator, all_agree};

use crate::{Error, Result};

/// Returns an error on all ranks if one rank failed.
pub(crate) fn all_or_error<T>(world: &dyn Communicator, own: Result<T>) -> Result<T> {
    all_agree([world], own, peer_failed)
}

pub(crate) fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFailed { rank, reason }
}
