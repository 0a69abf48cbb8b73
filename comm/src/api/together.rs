//! Work in which every rank has a part, and which is complete or not there at all, such as a checkpoint.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agree::all_agree;
use crate::{Communicator, Error, broadcast_object, gather_object};

/// Makes something of parts, such as a checkpoint to which each rank writes a file. The first rank begins it, every rank makes
/// its part of what the first has begun, and the first completes it with the parts of all, in order of rank. Returns what the
/// first rank has begun. Every rank must call it.
///
/// The groups are as in [`all_agree`]: one, or the axes of a mesh. The first rank is the one that has rank 0 in each.
///
/// # Cost
/// For each group a broadcast of what was begun, a gather of the parts, and a few bytes for each of the three steps.
///
/// # Errors
/// If a step fails on a rank, every rank returns an error, and the later steps are not done: that rank its own, the others
/// the result of `peer_failed`, as in [`all_agree`]. Failures of communication.
///
/// ```
/// use std::sync::Mutex;
/// use comm::{Communicator, Error, Local, complete_together};
///
/// let files = Mutex::new(Vec::new());
/// let folders = Local::run(3, |comm| {
///     let failed = |rank: usize, reason: String| Error::System { what: format!("rank {rank}"), reason };
///     let part = |folder: &String| Ok(format!("{folder}/part-{}", comm.rank()));
///     let complete = |_: &String, parts: Vec<String>| {
///         files.lock().unwrap().extend(parts);
///         Ok(())
///     };
///     complete_together(&[comm as &dyn Communicator], || Ok("step-7".to_string()), part, complete, failed)
/// })?;
/// assert_eq!(folders, ["step-7"; 3]);
/// assert_eq!(files.into_inner().unwrap(), ["step-7/part-0", "step-7/part-1", "step-7/part-2"]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn complete_together<B, P, E>(
    groups: &[&dyn Communicator],
    begin: impl FnOnce() -> std::result::Result<B, E>,
    part: impl FnOnce(&B) -> std::result::Result<P, E>,
    complete: impl FnOnce(&B, Vec<P>) -> std::result::Result<(), E>,
    peer_failed: impl Fn(usize, String) -> E,
) -> std::result::Result<B, E>
where
    B: Default + Serialize + DeserializeOwned,
    P: Serialize + DeserializeOwned,
    E: Display + From<Error>,
{
    let is_first = groups.iter().all(|group| group.rank() == 0);
    let all = || groups.iter().copied();
    let begun = if is_first { begin() } else { Ok(B::default()) };
    let mut begun = all_agree(all(), begun, &peer_failed)?;
    for group in all() {
        begun = broadcast_object(group, &begun, 0)?;
    }
    let mut parts = vec![all_agree(all(), part(&begun), &peer_failed)?];
    for group in all() {
        // What a rank in the middle of an earlier group has gathered is empty.
        parts = gather_object(group, &parts, 0)?.unwrap_or_default().into_iter().flatten().collect();
    }
    let completed = if is_first { complete(&begun, parts) } else { Ok(()) };
    all_agree(all(), completed, &peer_failed)?;
    Ok(begun)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Local, Mesh};

    #[test]
    fn along_the_axes_of_a_mesh_the_first_rank_has_the_parts_of_all() {
        let made = Local::run_shared(6, |comm| {
            let mesh = Mesh::new(comm.clone(), &[("dp", 2), ("tp", 3)])?;
            let groups = [&**mesh.axis("tp")?, &**mesh.axis("dp")?];
            let mut all = None;
            let part = |begun: &usize| Ok(10 * begun + comm.rank());
            let complete = |_: &usize, parts| {
                all = Some(parts);
                Ok(())
            };
            let failed = |rank: usize, reason| Error::system(format!("rank {rank}"), reason);
            let begun = complete_together(&groups, || Ok(7), part, complete, failed)?;
            Ok((begun, all))
        });
        let mut expected = vec![(7, None); 6];
        expected[0].1 = Some((70..76).collect::<Vec<usize>>());
        assert_eq!(made.unwrap(), expected);
    }
}
