//! Writing a checkpoint, so that a crash after any step leaves the old one or the new one whole.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use candle_core::Tensor;

use super::manifest::{self, FileHash, Manifest, is_name};
use super::{Checkpoint, CheckpointConfig, Checkpoints, io, name, numbers};
use crate::{Error, Result, write_tensors};

const UNFINISHED: &str = Checkpoints::UNFINISHED;
pub(super) const LATEST: &str = "latest";

/// A change that was just made to the disk.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Change {
    /// A folder was made.
    Made(PathBuf),
    /// A file was written, but may not have reached the disk.
    Wrote(PathBuf),
    /// A file or a folder's list of names reached the disk.
    Synced(PathBuf),
    /// A name was changed; sure once the folder is synced.
    Renamed(PathBuf, PathBuf),
    /// A folder was removed with all that was in it.
    Removed(PathBuf),
}

/// Writes a checkpoint, makes it the latest, removes old ones. `watch` hears of each change, and stops all by an error:
/// the disk is then as a crash at this moment leaves it.
pub(super) fn save(
    config: &CheckpointConfig,
    checkpoint: &Checkpoint,
    watch: &dyn Fn(Change) -> Result<()>,
) -> Result<PathBuf> {
    if let Some(name) = checkpoint.tensors.keys().find(|name| !is_name(name)) {
        return Err(Error::InvalidName { name: name.clone() });
    }
    let number = begin(config, watch)?;
    let mut hashes = BTreeMap::new();
    for (name, tensors) in &checkpoint.tensors {
        hashes.insert(name.clone(), file(config, number, (name, tensors), watch)?);
    }
    commit(config, number, checkpoint, hashes, watch)
}

/// Makes the folder of a new checkpoint, under a name that does not count yet; its number.
pub(super) fn begin(config: &CheckpointConfig, watch: &dyn Fn(Change) -> Result<()>) -> Result<u64> {
    let writer = Writer { dir: &config.dir, watch };
    writer.clean_up()?;
    let number = numbers(&config.dir)?.last().map_or(1, |last| last + 1);
    let folder = unfinished(&config.dir, number);
    fs::create_dir(&folder).map_err(io("make the folder", &folder))?;
    watch(Change::Made(folder))?;
    Ok(number)
}

/// Writes a set of tensors into it, safe on the disk.
pub(super) fn file(
    config: &CheckpointConfig,
    number: u64,
    (name, tensors): (&str, &HashMap<String, Tensor>),
    watch: &dyn Fn(Change) -> Result<()>,
) -> Result<FileHash> {
    if !is_name(name) {
        return Err(Error::InvalidName { name: name.to_string() });
    }
    let path = unfinished(&config.dir, number).join(tensors_file(name));
    Writer { dir: &config.dir, watch }.tensors(&path, tensors)
}

/// Makes it a checkpoint and the latest, and removes old ones; its folder.
pub(super) fn commit(
    config: &CheckpointConfig,
    number: u64,
    checkpoint: &Checkpoint,
    hashes: BTreeMap<String, FileHash>,
    watch: &dyn Fn(Change) -> Result<()>,
) -> Result<PathBuf> {
    let writer = Writer { dir: &config.dir, watch };
    let unfinished = unfinished(&config.dir, number);
    let folder = config.dir.join(name(number));
    for (name, hash) in &hashes {
        // Another process that saves to this folder, or a folder that not all processes see.
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
    writer.remove_old(config.keep)?;
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
    /// The manifest, safe on the disk with the names of all files; its text.
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
        // Nothing is there yet, and it does not count before the checkpoint does.
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

    /// Waits until a file's bytes, or a folder's names, are on the disk itself.
    fn sync(&self, path: &Path) -> Result<()> {
        // Where folders cannot be opened as files, the system keeps their order by itself.
        if cfg!(unix) || path.is_file() {
            File::open(path).and_then(|file| file.sync_all()).map_err(io("fsync", path))?;
        }
        (self.watch)(Change::Synced(path.to_path_buf()))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        fs::rename(from, to).map_err(io("rename", from))?;
        (self.watch)(Change::Renamed(from.to_path_buf(), to.to_path_buf()))
    }

    /// The file `latest`: a checkpoint's name, and the hash of its manifest, so that no flipped bit points to another one.
    fn point_to(&self, name: &str, manifest: &str) -> Result<()> {
        let (unfinished, latest) = (self.dir.join(format!("{UNFINISHED}{LATEST}")), self.dir.join(LATEST));
        self.text(&unfinished, &format!("{name} {}\n", manifest::sha256(manifest.as_bytes())))?;
        self.rename(&unfinished, &latest)?;
        self.sync(self.dir)
    }

    fn remove_old(&self, keep: usize) -> Result<()> {
        let all = numbers(self.dir)?;
        for &number in &all[..all.len().saturating_sub(keep)] {
            // Under another name first: a folder is removed file by file, and must not be taken for a checkpoint meanwhile.
            let unfinished = self.dir.join(format!("{UNFINISHED}old-{}", name(number)));
            let renamed = self.rename(&self.dir.join(name(number)), &unfinished);
            told(renamed.and_then(|()| self.sync(self.dir)).and_then(|()| self.remove(&unfinished)))?;
        }
        Ok(())
    }

    /// Removes what an earlier save, stopped half way, left behind.
    fn clean_up(&self) -> Result<()> {
        for entry in fs::read_dir(self.dir).map_err(io("list", self.dir))? {
            let entry = entry.map_err(io("list", self.dir))?;
            if entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
                told(self.remove(&entry.path()))?;
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

/// What cannot be removed is in nobody's way but takes room: a warning, and the training goes on.
fn told(removed: Result<()>) -> Result<()> {
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
