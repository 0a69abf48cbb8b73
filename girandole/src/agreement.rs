//! Agreement of ranks: an error of one becomes an error of all.

use comm::Communicator;

use crate::Result;

/// Returns this rank's result if no rank has failed; otherwise an error on every rank.
pub(crate) fn all_agree<T>(world: &dyn Communicator, own: Result<T>) -> Result<T> {
    strategy::all_agree([world], own)
}
