//! Agreement of ranks: an error of one becomes an error of all.

use std::fmt::Display;

use comm::internal::{to_bytes, to_value};
use comm::{Communicator, all_gather_object};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;

/// Returns this rank's result if no rank has failed; otherwise an error on every rank: its own, or
/// [`Error::PeerFailed`]. Call on every rank of the groups, which are as in [`all_agree_with`].
///
/// # Errors
/// As above; failures of communication.
pub fn all_agree<'a, T, E: From<Error> + From<comm::Error> + Display>(
    groups: impl IntoIterator<Item = &'a dyn Communicator>,
    own: Result<T, E>,
) -> Result<T, E> {
    all_agree_with(groups, own, |rank, reason| Error::PeerFailed { rank, reason }.into())
}

/// Returns this rank's `own` value if it is `Ok` on every rank. Otherwise returns an error on every rank: its own, or
/// the result of `peer_failed` for the first rank that failed (its number in the whole job, and the text of its error).
/// Every rank must call it, so that no rank continues alone into a collective and waits there for those that have
/// failed.
///
/// The ranks are those of a group, or of all groups along the axes of a [`comm::Mesh`].
///
/// # Cost
/// Two all-gathers for each group, of a few bytes unless one failed.
///
/// # Errors
/// As above; failures of communication.
///
/// ```
/// use comm::{Communicator, Error, Local};
///
/// let said = Local::run(2, |comm| {
///     let failed = |what: &str, reason: String| Error::System { what: what.into(), reason };
///     let own = if comm.rank() == 1 { Err(failed("the disk", "it is full".into())) } else { Ok(5) };
///     let groups = [comm as &dyn Communicator];
///     let all = strategy::all_agree_with(groups, own, |rank, reason| failed(&format!("rank {rank}"), reason));
///     Ok(all.map_err(|error| error.to_string()))
/// })?;
/// assert_eq!(said[0], Err("rank 1: the disk: it is full".to_string()));
/// assert_eq!(said[1], Err("the disk: it is full".to_string()));
/// # Ok::<(), comm::Error>(())
/// ```
pub fn all_agree_with<'a, T, E: Display + From<comm::Error>>(
    groups: impl IntoIterator<Item = &'a dyn Communicator>,
    own: Result<T, E>,
    peer_failed: impl FnOnce(usize, String) -> E,
) -> Result<T, E> {
    let first = first_of(groups, own.as_ref().err().map(E::to_string));
    let own = own?;
    match first? {
        Some((rank, reason)) => Err(peer_failed(rank, reason)),
        None => Ok(own),
    }
}

/// Returns the first rank, by its number in the whole job, that passes `Some`, with its value: the same on every rank.
/// `None` if no rank passes a value. Every rank of the groups must call it; the groups are as in [`all_agree_with`].
///
/// # Cost
/// Two all-gathers for each group, of a few bytes if no rank has a value.
///
/// # Errors
/// Failures of communication; a value that cannot be encoded.
///
/// ```
/// use comm::{Communicator, Local};
/// use strategy::first_of;
///
/// let found = Local::run(3, |comm| {
///     let own = (comm.rank() > 0).then(|| format!("a NaN in weight {}", comm.rank()));
///     first_of([comm as &dyn Communicator], own)
/// })?;
/// assert_eq!(found, vec![Some((1, "a NaN in weight 1".to_string())); 3]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn first_of<'a, T: Serialize + DeserializeOwned>(
    groups: impl IntoIterator<Item = &'a dyn Communicator>,
    own: Option<T>,
) -> comm::Result<Option<(usize, T)>> {
    // As bytes, which can always be sent: a value that cannot must be an error on the ranks of all groups.
    let mut own = own.map(|own| to_bytes(&own));
    let mut first: Option<(usize, Result<Vec<u8>, String>)> = None;
    for group in groups {
        let value = own.take().map(|own| (group.world_ranks()[group.rank()], own)).or(first.take());
        first = all_gather_object(group, &value)?.into_iter().flatten().min_by_key(|(rank, _)| *rank);
    }
    let Some((rank, value)) = first else { return Ok(None) };
    let value = value.and_then(|bytes| to_value(&bytes));
    let what = || format!("the value of rank {rank}, which cannot be encoded");
    value.map(|value| Some((rank, value))).map_err(|reason| comm::Error::System { what: what(), reason })
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
pub(crate) fn rank_and_count(groups: &[&dyn Communicator]) -> (usize, usize) {
    groups.iter().rev().fold((0, 1), |(rank, ranks), group| {
        (rank * group.world_size() + group.rank(), ranks * group.world_size())
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use comm::{Local, Mesh};

    fn failed(what: String, reason: &str) -> comm::Error {
        comm::Error::System { what, reason: reason.into() }
    }

    fn agree<'a>(
        groups: impl IntoIterator<Item = &'a dyn Communicator>,
        rank: usize,
        fails: &[usize],
    ) -> comm::Result<usize> {
        let own = match fails.contains(&rank) {
            true => Err(failed(format!("disk {rank}"), "full")),
            false => Ok(rank),
        };
        all_agree_with(groups, own, |rank, reason| failed(format!("rank {rank}"), &reason))
    }

    fn expected(rank: usize, fails: &[usize]) -> Result<usize, String> {
        match fails.first() {
            _ if fails.contains(&rank) => Err(format!("disk {rank}: full")),
            Some(first) => Err(format!("rank {first}: disk {first}: full")),
            None => Ok(rank),
        }
    }

    /// All sets of failing ranks, each in ascending order.
    fn subsets(ranks: usize) -> impl Iterator<Item = Vec<usize>> {
        (0..1 << ranks).map(move |set: usize| (0..ranks).filter(|rank| set >> rank & 1 == 1).collect())
    }

    #[test]
    fn the_first_failure_is_known_to_all() {
        for ranks in 1..=4 {
            for fails in subsets(ranks) {
                let said = Local::run(ranks, |comm| {
                    let said = agree([comm as &dyn Communicator], comm.rank(), &fails);
                    // No rank is still in a collective.
                    comm.barrier()?.wait()?;
                    Ok((comm.rank(), said.map_err(|error| error.to_string())))
                });
                for (rank, said) in said.unwrap() {
                    assert_eq!(said, expected(rank, &fails), "rank {rank} of {ranks}, {fails:?}");
                }
            }
        }
    }

    #[test]
    fn ranks_of_a_mesh_are_named_by_their_numbers_in_the_job() {
        for fails in subsets(4) {
            let said = Local::run_shared(4, |comm| {
                let mesh = Mesh::new(comm.clone(), &[("dp", 2), ("tp", 2)])?;
                let groups = [mesh.axis("tp")?, mesh.axis("dp")?];
                let groups = groups.iter().map(|group| &***group as &dyn Communicator);
                Ok(agree(groups, comm.rank(), &fails).map_err(|error| error.to_string()))
            });
            for (rank, said) in said.unwrap().into_iter().enumerate() {
                assert_eq!(said, expected(rank, &fails), "rank {rank}, {fails:?}");
            }
        }
    }

    #[test]
    fn without_groups_a_rank_agrees_with_itself() {
        assert_eq!(agree([], 0, &[]).unwrap(), 0);
        assert_eq!(agree([], 0, &[0]).unwrap_err().to_string(), "disk 0: full");
    }

    #[test]
    fn ranks_of_a_part_of_the_job_too() {
        let said = Local::run_shared(3, |comm| {
            let Some(group) = comm.new_group(&[1, 2])? else { return Ok(String::new()) };
            let said = agree([&*group], comm.rank(), &[2]);
            Ok(said.unwrap_err().to_string())
        });
        assert_eq!(said.unwrap(), ["", "rank 2: disk 2: full", "disk 2: full"]);
    }

    /// Calls `first_of` for a value of rank 3, on four ranks in two groups each.
    fn first_of_rank_3<T: Serialize + DeserializeOwned + Send>(
        value: impl Fn() -> T + Sync,
    ) -> Vec<Result<Option<(usize, T)>, String>> {
        let said = Local::run_shared(4, |comm| {
            let own = (comm.rank() == 3).then(&value);
            let mesh = Mesh::new(comm, &[("dp", 2), ("tp", 2)])?;
            let groups = [mesh.axis("tp")?, mesh.axis("dp")?];
            let groups = groups.iter().map(|group| &***group as &dyn Communicator);
            Ok(first_of(groups, own).map_err(|error| error.to_string()))
        });
        said.unwrap()
    }

    #[test]
    fn a_value_that_cannot_be_sent_is_an_error_on_all_ranks_of_all_groups() {
        // A file name that is not UTF-8.
        let name = || std::path::PathBuf::from(std::ffi::OsString::from_vec(vec![0xff]));
        for said in first_of_rank_3(name) {
            assert!(said.unwrap_err().starts_with("the value of rank 3, which cannot be encoded: "));
        }
        for said in first_of_rank_3(|| f64::NAN) {
            assert!(matches!(said, Ok(Some((3, value))) if value.is_nan()), "{said:?}");
        }
    }
}
