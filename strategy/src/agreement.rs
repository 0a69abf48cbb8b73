//! Agreement of ranks: an error of one becomes an error of all.

use std::fmt::Display;

use comm::{Communicator, all_gather_object};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// Returns this rank's result if no rank has failed; otherwise an error on every rank: its own, or
/// [`Error::PeerFailed`]. Call on every rank of the groups, which are as in [`comm::all_agree`].
///
/// # Errors
/// As above; failures of communication.
pub fn all_agree<'a, T, E: From<Error> + From<comm::Error> + Display>(
    groups: impl IntoIterator<Item = &'a dyn Communicator>,
    own: Result<T, E>,
) -> Result<T, E> {
    comm::all_agree(groups, own, |rank, reason| Error::PeerFailed { rank, reason }.into())
}

/// Returns the values of all ranks, in the order of their places along the groups, of which the last counts most.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(
    groups: &[&dyn Communicator],
    own: T,
) -> comm::Result<Vec<T>> {
    let mut all = vec![own];
    for group in groups {
        all = all_gather_object(*group, &all)?.into_iter().flatten().collect();
    }
    Ok(all)
}

/// Returns this rank's index in what [`gather`] returns, and the number of ranks.
pub(crate) fn place(groups: &[&dyn Communicator]) -> (usize, usize) {
    groups.iter().rev().fold((0, 1), |(rank, ranks), group| {
        (rank * group.world_size() + group.rank(), ranks * group.world_size())
    })
}
