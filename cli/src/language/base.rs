//! Fingerprint of the weights that a run begins with, which all ranks must read alike.

use crate::error::{Error, Result};
use comm::{Communicator, all_gather_object};
use models::Weights;
use strategy::all_agree_with;

/// Returns the fingerprint of all bytes of a folder's weights; `None` for random ones. Ranks that see the same files read
/// a part each. If all do, there is nothing to compare, and without `is_kept` nothing is read. Every rank must call it.
///
/// # Errors
/// Files that cannot be read; failures of communication.
pub(super) fn fingerprint(
    weights: &Weights,
    comm: &dyn Communicator,
    is_kept: bool,
) -> Result<Option<String>> {
    let failed = |rank, reason| girandole::Error::PeerFailed { rank, reason }.into();
    let files = weights.files().map_err(Error::from);
    let own = (comm::internal::host_name(), all_agree_with([comm], files, failed)?);
    let all = all_gather_object(comm, &own)?;
    let here: Vec<usize> = (0..all.len()).filter(|rank| all[*rank] == own).collect();
    if !is_kept && here.len() == all.len() {
        return Ok(None);
    }
    let place = here.iter().position(|rank| *rank == comm.rank()).unwrap_or_default();
    let hashes = weights.hashes(place, here.len()).map_err(Error::from);
    let all = all_gather_object(comm, &all_agree_with([comm], hashes, failed)?)?;
    let pieces: usize = here.iter().map(|rank| all[*rank].len()).sum();
    let piece = |number: usize| all[here[number % here.len()]].get(number / here.len()).cloned();
    Ok(weights.fingerprint_of(&(0..pieces).filter_map(piece).collect::<Vec<_>>()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use comm::Local;

    use super::*;

    #[test]
    fn ranks_that_see_other_files_find_another_fingerprint() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/qwen2");
        let copy = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(format!("{fixture}/{file}"), copy.path().join(file)).unwrap();
        }
        let on_ranks = |last: &std::path::Path, is_kept| {
            let found = Local::run(3, |comm| {
                let folder = if comm.rank() == 2 { last } else { fixture.as_ref() };
                let weights = Weights::folder(folder).map_err(comm::carry)?;
                Ok(fingerprint(&weights, comm, is_kept).map_err(comm::carry)?)
            });
            found.unwrap()
        };
        let alone = Weights::folder(fixture.as_ref()).unwrap().fingerprint().unwrap();
        assert_eq!(on_ranks(fixture.as_ref(), true), vec![alone.clone(); 3]);
        assert_eq!(on_ranks(fixture.as_ref(), false), vec![None; 3]);
        assert_eq!(on_ranks(copy.path(), false), vec![alone.clone(); 3]);
        let path = copy.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        let found = on_ranks(copy.path(), false);
        assert!(found[0] == alone && found[1] == alone && found[2].is_some() && found[2] != alone);
    }
}
