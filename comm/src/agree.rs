//! What fails on one rank alone, such as reading a file, fails on all.

use std::fmt::Display;

use crate::{Communicator, Error, all_gather_object};

/// This rank's `own` where it is `Ok` on every rank. Otherwise an error on every rank: its own, or what `peer_failed` makes of
/// the first rank that failed, by its number in the whole job, and of what that rank says. To be called on every rank, so that
/// none goes on alone into a collective and waits there for those that have failed.
///
/// The ranks are those of a group, or of all groups along the axes of a [`crate::Mesh`].
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
///     let all = comm::all_agree(groups, own, |rank, reason| failed(&format!("rank {rank}"), reason));
///     Ok(all.map_err(|error| error.to_string()))
/// })?;
/// assert_eq!(said[0], Err("rank 1: the disk: it is full".to_string()));
/// assert_eq!(said[1], Err("the disk: it is full".to_string()));
/// # Ok::<(), comm::Error>(())
/// ```
pub fn all_agree<'a, T, E: Display + From<Error>>(
    groups: impl IntoIterator<Item = &'a dyn Communicator>,
    own: Result<T, E>,
    peer_failed: impl FnOnce(usize, String) -> E,
) -> Result<T, E> {
    let mut reason = own.as_ref().err().map(E::to_string);
    // With its number.
    let mut first: Option<(usize, String)> = None;
    let mut known = Ok(());
    for group in groups {
        let told = reason.take().map(|reason| (group.world_ranks()[group.rank()], reason)).or(first.take());
        match all_gather_object(group, &told) {
            Ok(all) => first = all.into_iter().flatten().min(),
            Err(error) => {
                known = Err(error);
                break;
            }
        }
    }
    let own = own?;
    known?;
    match first {
        Some((rank, reason)) => Err(peer_failed(rank, reason)),
        None => Ok(own),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::{Local, Mesh, Result};

    fn agree<'a>(
        groups: impl IntoIterator<Item = &'a dyn Communicator>,
        rank: usize,
        fails: &[usize],
    ) -> Result<usize> {
        let own = match fails.contains(&rank) {
            true => Err(Error::system(format!("disk {rank}"), "full")),
            false => Ok(rank),
        };
        all_agree(groups, own, |rank, reason| Error::system(format!("rank {rank}"), reason))
    }

    fn expected(rank: usize, fails: &[usize]) -> std::result::Result<usize, String> {
        match fails.first() {
            _ if fails.contains(&rank) => Err(format!("disk {rank}: full")),
            Some(first) => Err(format!("rank {first}: disk {first}: full")),
            None => Ok(rank),
        }
    }

    /// All sets of ranks that may fail, in order.
    fn subsets(ranks: usize) -> impl Iterator<Item = Vec<usize>> {
        (0..1 << ranks).map(move |set: usize| (0..ranks).filter(|rank| set >> rank & 1 == 1).collect())
    }

    #[test]
    fn the_first_failure_is_known_to_all() {
        for ranks in 1..=4 {
            for fails in subsets(ranks) {
                let said = Local::run(ranks, |comm| {
                    let said = agree([comm as &dyn Communicator], comm.rank(), &fails);
                    // None is still in a collective.
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
}
