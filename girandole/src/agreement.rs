//! Agreement of ranks: an error of one becomes an error of all.

use comm::Communicator;

use crate::{Error, Result};

/// Returns this rank's result if no rank has failed; otherwise an error on every rank.
pub(crate) fn all_agree<T>(world: &dyn Communicator, own: Result<T>) -> Result<T> {
    comm::all_agree([world], own, peer_failed)
}

pub(crate) fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFailed { rank, reason }
}
