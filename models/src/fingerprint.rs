//! Fingerprint of a folder's weights: a hash of all their bytes, which threads and ranks can share the work of.

use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rayon::prelude::*;

use crate::digest::Hash;
use crate::folder::Folder;
use crate::{Result, Weights};

/// Bytes of a piece, each of which has its own hash.
const PIECE: u64 = 1 << 24;
/// Bytes read at a time.
const CHUNK: usize = 1 << 18;

impl Weights {
    /// Returns hashes of every `of`-th piece of the folder's tensors, from piece `first` on: all ranks that see the same
    /// [`files`](Self::files) compute a part each, and [`fingerprint_of`](Self::fingerprint_of) makes one fingerprint of
    /// all. None for random weights.
    ///
    /// # Cost
    /// The files are read once, by all threads of the process.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn hashes(&self, first: usize, of: usize) -> Result<Vec<String>> {
        let Some(folder) = &self.inner.folder else { return Ok(Vec::new()) };
        let pieces: Vec<_> = pieces(folder).into_iter().skip(first).step_by(of.max(1)).collect();
        pieces.into_par_iter().map(|(name, range)| hash(folder, name, range)).collect()
    }

    /// Returns a fingerprint of the folder's tensors from the hashes of all pieces, in order: it depends on their names,
    /// shapes, dtypes and all their bytes. `None` for random weights.
    pub fn fingerprint_of(&self, hashes: &[String]) -> Option<String> {
        let folder = self.inner.folder.as_ref()?;
        let mut all = Hash::default();
        for (name, entry) in folder.entries() {
            all.add(format!("{name} {} {:?}\n", entry.dtype_name(), entry.dims).as_bytes());
        }
        hashes.iter().for_each(|hash| all.add(hash.as_bytes()));
        Some(all.hex())
    }

    /// Returns the same, computed by this process alone.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn fingerprint(&self) -> Result<Option<String>> {
        Ok(self.fingerprint_of(&self.hashes(0, 1)?))
    }

    /// Returns what identifies the folder's files on this host: for each file its device, number, length and time of the
    /// last change. Empty for random weights.
    ///
    /// # Errors
    /// A file of which that cannot be found out.
    pub fn files(&self) -> Result<Vec<[i64; 5]>> {
        let Some(folder) = &self.inner.folder else { return Ok(Vec::new()) };
        let identity = |found: std::fs::Metadata| {
            [found.dev() as i64, found.ino() as i64, found.len() as i64, found.mtime(), found.mtime_nsec()]
        };
        folder.metadata()?.into_iter().map(|found| Ok(identity(found))).collect()
    }
}

/// Returns the pieces of all tensors: name, and range of its bytes. No piece has bytes of two tensors.
fn pieces(folder: &Folder) -> Vec<(&str, Range<u64>)> {
    let mut all = Vec::new();
    for (name, entry) in folder.entries() {
        let bytes = entry.bytes();
        let ranges = (0..bytes).step_by(PIECE as usize).map(|from| from..bytes.min(from + PIECE));
        all.extend(ranges.map(|range| (name, range)));
    }
    all
}

fn hash(folder: &Folder, name: &str, range: Range<u64>) -> Result<String> {
    let (mut hash, mut buffer) = (Hash::default(), vec![0; CHUNK]);
    for from in range.clone().step_by(CHUNK) {
        let part = &mut buffer[..(range.end - from).min(CHUNK as u64) as usize];
        folder.read_bytes(name, from, part)?;
        hash.add(part);
    }
    Ok(hash.hex())
}
