//! Work in which every rank has a part, and which is complete or not there at all, such as a checkpoint.

use comm::{Communicator, broadcast_object, gather_object};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{Result, all_agree};

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
/// [`Error::PeerFailed`](crate::Error::PeerFailed). Failures of communication.
pub(crate) fn complete_together<B, P>(
    groups: &[&dyn Communicator],
    begin: impl FnOnce() -> Result<B>,
    part: impl FnOnce(&B) -> Result<P>,
    complete: impl FnOnce(&B, Vec<P>) -> Result<()>,
) -> Result<B>
where
    B: Default + Serialize + DeserializeOwned,
    P: Serialize + DeserializeOwned,
{
    let is_first = groups.iter().all(|group| group.rank() == 0);
    let all = || groups.iter().copied();
    let begun = if is_first { begin() } else { Ok(B::default()) };
    let mut begun = all_agree(all(), begun)?;
    for group in all() {
        begun = broadcast_object(group, &begun, 0)?;
    }
    let mut parts = vec![all_agree(all(), part(&begun))?];
    for group in all() {
        // What a rank in the middle of an earlier group has gathered is empty.
        parts = gather_object(group, &parts, 0)?.unwrap_or_default().into_iter().flatten().collect();
    }
    let completed = if is_first { complete(&begun, parts) } else { Ok(()) };
    all_agree(all(), completed)?;
    Ok(begun)
}

#[cfg(test)]
mod tests {
    use comm::{Local, Mesh};

    use super::*;

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
            let begun = complete_together(&groups, || Ok(7), part, complete)?;
            Ok((begun, all))
        });
        let mut expected = vec![(7, None); 6];
        expected[0].1 = Some((70..76).collect::<Vec<usize>>());
        assert_eq!(made.unwrap(), expected);
    }
}
