//! Checkpoint writer: a crash after any step leaves the old checkpoint or the new one complete.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::manifest::{self, FileHash, Manifest, is_name};
use super::{Checkpoint, CheckpointConfig, Checkpoints, io, name, numbers};
use crate::file::write_tensors;
use crate::{Error, Result};

const UNFINISHED: &str = Checkpoints::UNFINISHED;
pub(super) const LATEST: &str = "latest";

/// A change just made to the disk.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// A folder was made.
    Made(PathBuf),
    /// A file was written, but may not have reached the disk.
    Wrote(PathBuf),
    /// A file's content or a folder's entries reached the disk.
    Synced(PathBuf),
    /// A file or folder was renamed; durable once the containing folder is synced.
    Renamed(PathBuf, PathBuf),
    /// A file or folder was removed, with everything in it.
    Removed(PathBuf),
}

/// Writes a checkpoint, makes it the latest, and removes old ones. `watch` is called after each change; if it returns
/// an error, the save stops and leaves the disk as a crash at this moment would.
pub(super) fn save(
    config: &CheckpointConfig,
    kept_from: u64,
    checkpoint: &Checkpoint,
    watch: &dyn Fn(Change) -> Result<()>,
) -> Result<PathBuf> {
    if let Some(name) = checkpoint.tensors.keys().find(|name| !is_name(name)) {
        return Err(Error::InvalidName { name: name.clone() });
    }
    let number = begin(config, watch)?;
    let mut hashes = BTreeMap::new();
    for (name, tensors) in &checkpoint.tensors {
        hashes.insert(name.clone(), file(config, number, name, tensors, watch)?);
    }
    commit(config, kept_from, number, checkpoint, hashes, watch)
}

/// Creates the folder of a new checkpoint under a temporary name, and returns its number.
pub(super) fn begin(config: &CheckpointConfig, watch: &dyn Fn(Change) -> Result<()>) -> Result<u64> {
    let writer = Writer { dir: &config.dir, watch };
    writer.clean_up()?;
    let number = numbers(&config.dir)?.last().map_or(1, |last| last + 1);
    let folder = unfinished(&config.dir, number);
    fs::create_dir(&folder).map_err(io("make the folder", &folder))?;
    watch(Change::Made(folder))?;
    Ok(number)
}

/// Writes a set of tensors into the draft and syncs it to disk.
pub(super) fn file(
    config: &CheckpointConfig,
    number: u64,
    name: &str,
    tensors: &HashMap<String, Tensor>,
    watch: &dyn Fn(Change) -> Result<()>,
) -> Result<FileHash> {
    if !is_name(name) {
        return Err(Error::InvalidName { name: name.to_string() });
    }
    let path = unfinished(&config.dir, number).join(tensors_file(name));
    Writer { dir: &config.dir, watch }.tensors(&path, tensors)
}

/// Commits the draft as a checkpoint, makes it the latest, removes old ones, and returns its folder.
pub(super) fn commit(
    config: &CheckpointConfig,
    kept_from: u64,
    number: u64,
    checkpoint: &Checkpoint,
    hashes: BTreeMap<String, FileHash>,
    watch: &dyn Fn(Change) -> Result<()>,
) -> Result<PathBuf> {
    let writer = Writer { dir: &config.dir, watch };
    let unfinished = unfinished(&config.dir, number);
    let folder = config.dir.join(name(number));
    for (name, hash) in &hashes {
        // Detects another process that saves to this folder, and a folder that not all processes share.
        let path = unfinished.join(tensors_file(name));
        let bytes = fs::metadata(&path).map_err(io("find what another process wrote,", &path))?.len();
        if bytes != hash.bytes {
            let reason =
                format!("it has {bytes} bytes, and {} were written: something else writes there", hash.bytes);
            return Err(io("trust", &path)(std::io::Error::other(reason)));
        }
    }
    let manifest = writer.manifest(&unfinished, checkpoint, hashes)?;
    writer.rename(&unfinished, &folder)?;
    writer.sync(&config.dir)?;
    writer.point_to(&name(number), &manifest)?;
    writer.remove_old(config.keep, kept_from)?;
    Ok(folder)
}

fn unfinished(dir: &Path, number: u64) -> PathBuf {
    dir.join(format!("{UNFINISHED}{}", name(number)))
}

struct Writer<'a> {
    dir: &'a Path,
    watch: &'a dyn Fn(Change) -> Result<()>,
}

impl Writer<'_> {
    /// Writes the manifest and syncs it with the folder's entries; returns its text.
    fn manifest(
        &self,
        folder: &Path,
        checkpoint: &Checkpoint,
        hashes: BTreeMap<String, FileHash>,
    ) -> Result<String> {
        let path = folder.join(manifest::FILE);
        let text =
            Manifest::new(checkpoint, hashes).encode().map_err(|error| io("write", &path)(error.into()))?;
        self.text(&path, &text)?;
        self.sync(folder)?;
        Ok(text)
    }

    fn tensors(&self, path: &Path, tensors: &HashMap<String, Tensor>) -> Result<FileHash> {
        // The file does not exist yet, and does not count before the checkpoint is committed.
        File::create(path)
            .and_then(|mut file| write_tensors(&mut file, tensors, None))
            .map_err(io("write", path))?;
        (self.watch)(Change::Wrote(path.to_path_buf()))?;
        self.sync(path)?;
        FileHash::of(path).map_err(io("read", path))
    }

    fn text(&self, path: &Path, text: &str) -> Result<()> {
        fs::write(path, text).map_err(io("write", path))?;
        (self.watch)(Change::Wrote(path.to_path_buf()))?;
        self.sync(path)
    }

    /// Waits until a file's content, or a folder's entries, are on disk (fsync).
    fn sync(&self, path: &Path) -> Result<()> {
        // Where folders cannot be opened as files, the operating system orders renames by itself.
        if cfg!(unix) || path.is_file() {
            File::open(path).and_then(|file| file.sync_all()).map_err(io("fsync", path))?;
        }
        (self.watch)(Change::Synced(path.to_path_buf()))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(io("rename", from))?;
        (self.watch)(Change::Renamed(from.to_path_buf(), to.to_path_buf()))
    }

    /// Writes the file `latest`: a checkpoint's name, and the hash of its manifest, so that a flipped bit cannot
    /// point to another checkpoint.
    fn point_to(&self, name: &str, manifest: &str) -> Result<()> {
        let (unfinished, latest) = (self.dir.join(format!("{UNFINISHED}{LATEST}")), self.dir.join(LATEST));
        self.text(&unfinished, &format!("{name} {}\n", manifest::sha256(manifest.as_bytes())))?;
        self.rename(&unfinished, &latest)?;
        self.sync(self.dir)
    }

    /// Removes all but the newest `keep`, and none from a number on.
    fn remove_old(&self, keep: usize, kept_from: u64) -> Result<()> {
        let all = numbers(self.dir)?;
        let old = &all[..all.len().saturating_sub(keep)];
        for &number in old.iter().take_while(|number| **number < kept_from) {
            // Renamed first: a folder is removed file by file, and must not be taken for a checkpoint meanwhile.
            let unfinished = self.dir.join(format!("{UNFINISHED}old-{}", name(number)));
            let renamed = self.rename(&self.dir.join(name(number)), &unfinished);
            warn_only(renamed.and_then(|()| self.sync(self.dir)).and_then(|()| self.remove(&unfinished)))?;
        }
        Ok(())
    }

    /// Removes what an interrupted save left behind.
    fn clean_up(&self) -> Result<()> {
        for entry in fs::read_dir(self.dir).map_err(io("list", self.dir))? {
            let entry = entry.map_err(io("list", self.dir))?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                warn_only(self.remove(&entry.path()))?;
            }
        }
        Ok(())
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.map_err(io("remove", path))?;
        (self.watch)(Change::Removed(path.to_path_buf()))
    }
}

/// Turns a failed removal into a warning: the files that stay only take disk space, so training continues.
fn warn_only(removed: Result<()>) -> Result<()> {
    match removed {
        Err(error @ Error::Io { .. }) => {
            tracing::warn!("an old checkpoint stays: {error}; remove it by hand, or make room");
            Ok(())
        }
        other => other,
    }
}

pub(super) fn tensors_file(name: &str) -> String {
    format!("{name}.safetensors")
}
