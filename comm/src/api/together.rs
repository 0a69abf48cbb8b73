//! Work in which every rank has a part, and which is complete or not there at all, such as a checkpoint.

use std::fmt::Display;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::agree::all_agree;
use crate::{Communicator, Error, broadcast_object, gather_object};

/// Makes something of parts, such as a checkpoint to which each rank writes a file. Rank 0 begins it, every rank makes its
/// part of what rank 0 has begun, and rank 0 completes it with the parts of all, in order of rank. Returns what rank 0 has
/// begun. Every rank must call it.
///
/// # Cost
/// A broadcast of what was begun, a gather of the parts, and a few bytes for each of the three steps.
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
///     complete_together(comm, || Ok("step-7".to_string()), part, complete, failed)
/// })?;
/// assert_eq!(folders, ["step-7"; 3]);
/// assert_eq!(files.into_inner().unwrap(), ["step-7/part-0", "step-7/part-1", "step-7/part-2"]);
/// # Ok::<(), comm::Error>(())
/// ```
pub fn complete_together<B, P, E>(
    world: &dyn Communicator,
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
    let begun = if world.rank() == 0 { begin() } else { Ok(B::default()) };
    let begun = broadcast_object(world, &all_agree([world], begun, &peer_failed)?, 0)?;
    let part = all_agree([world], part(&begun), &peer_failed)?;
    let completed = match gather_object(world, &part, 0)? {
        Some(parts) => complete(&begun, parts),
        None => Ok(()),
    };
    all_agree([world], completed, &peer_failed)?;
    Ok(begun)
}
