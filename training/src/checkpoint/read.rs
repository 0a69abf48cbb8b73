//! Checkpoint reader: verifies every file's hash and refuses damaged checkpoints.

use std::collections::{BTreeMap, HashMap};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use serde_json::Value;

use super::manifest::{self, FileHash, Manifest};
use super::write::{LATEST, tensors_file};
use super::{Checkpoint, io, name, number, numbers};
use crate::file::parent;
use crate::file::{read_input, tensor_header};
use crate::{Error, Result};

/// Contents of a checkpoint, without its tensors.
#[derive(Debug, Clone)]
pub struct Contents {
    /// Its folder.
    pub folder: PathBuf,
    /// See [`Checkpoint::epoch`].
    pub epoch: u64,
    /// See [`Checkpoint::step`].
    pub step: u64,
    /// See [`Checkpoint::sampler`].
    pub sampler: Value,
    /// See [`Checkpoint::extra`].
    pub extra: Value,
    /// Its sets of tensors, by name.
    pub files: BTreeMap<String, FileHash>,
}

impl Contents {
    /// Path of the safetensors file of a set of tensors.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.join(tensors_file(name))
    }

    /// Reads a file and checks it against its hash.
    ///
    /// # Errors
    /// [`Error::DamagedCheckpoint`] if it has changed since it was written, or no set of tensors has this
    /// name; [`Error::Io`].
    pub fn check(&self, name: &str) -> Result<()> {
        let none = FileHash { bytes: 0, sha256: "no hash".into() };
        check_file(&self.folder, name, self.files.get(name).unwrap_or(&none))
    }

    /// Checks one rank's share of the files, so that `ranks` ranks together read each file once.
    ///
    /// # Errors
    /// Those of [`Contents::check`], for the first such file by name.
    pub fn check_share(&self, rank: usize, ranks: usize) -> Result<()> {
        self.files.keys().skip(rank).step_by(ranks).try_for_each(|name| self.check(name))
    }

    /// Reads all files and checks them against their hashes, several at a time.
    ///
    /// # Errors
    /// Those of [`Contents::check`], for the first such file by name.
    pub fn check_all(&self) -> Result<()> {
        let checks: Vec<Result<()>> = self.files.par_iter().map(|(name, _)| self.check(name)).collect();
        checks.into_iter().collect()
    }
}

/// Reads the checkpoint that the file `latest` names, or else the newest.
pub(super) fn latest(dir: &Path, device: &Device) -> Result<Option<Checkpoint>> {
    let found = latest_folder(dir)?;
    found.map(|(folder, hash)| checkpoint(&folder, hash.as_deref(), device)).transpose()
}

/// Contents of that checkpoint, without the tensors.
pub(super) fn latest_contents(dir: &Path) -> Result<Option<Contents>> {
    let found = latest_folder(dir)?;
    found.map(|(folder, hash)| contents(&folder, hash.as_deref())).transpose()
}

/// Contents of the checkpoint in a folder. Its manifest must have the hash `expected`, if given.
pub(super) fn contents(folder: &Path, expected: Option<&str>) -> Result<Contents> {
    let manifest = manifest(folder, expected).map_err(|fault| with_fallback(folder, fault))?;
    let Manifest { epoch, step, sampler, extra, tensors: files, .. } = manifest;
    Ok(Contents { folder: folder.to_path_buf(), epoch, step, sampler, extra, files })
}

/// Checks that a file of a checkpoint has its expected size and hash.
fn check_file(folder: &Path, name: &str, expected: &FileHash) -> Result<()> {
    let file = folder.join(tensors_file(name));
    let problem = match FileHash::of(&file) {
        Ok(got) if got == *expected => return Ok(()),
        Ok(got) if got.bytes != expected.bytes => {
            format!("it has {} bytes, {} were written", got.bytes, expected.bytes)
        }
        Ok(got) => format!("its SHA-256 is {}, {} was written", got.sha256, expected.sha256),
        Err(error) => return Err(with_fallback(folder, Fault::reading(&file, error))),
    };
    Err(with_fallback(folder, Fault::Damaged { file, problem }))
}

/// The folder that `latest` names with the hash of its manifest, or else the newest folder and no hash.
fn latest_folder(dir: &Path) -> Result<Option<(PathBuf, Option<String>)>> {
    let Some(text) = read_latest_file(dir)? else {
        return Ok(numbers(dir)?.last().map(|&newest| (dir.join(name(newest)), None)));
    };
    let parts = text.strip_suffix('\n').and_then(|line| line.split_once(' '));
    match parts.filter(|(name, _)| number(name).is_some()) {
        Some((name, hash)) => Ok(Some((dir.join(name), Some(hash.to_string())))),
        None => {
            let (file, problem) = (dir.join(LATEST), "it does not name a checkpoint".to_string());
            Err(Error::DamagedCheckpoint { file, problem, good: newest_intact(dir, u64::MAX).into() })
        }
    }
}

/// Content of the file `latest`, or else the newest checkpoint's name.
pub(super) fn mark(dir: &Path) -> Result<Option<String>> {
    match read_latest_file(dir)? {
        Some(text) => Ok(Some(text)),
        None => Ok(numbers(dir)?.last().map(|&newest| name(newest))),
    }
}

/// Content of the file `latest`, or `None` if there is no such file.
fn read_latest_file(dir: &Path) -> Result<Option<String>> {
    let path = dir.join(LATEST);
    match read_input(&path) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(with_fallback(&path, Fault::reading(&path, error))),
    }
}

/// Reads the checkpoint in a folder. Its manifest must have the hash `expected`, if given.
pub(super) fn checkpoint(folder: &Path, expected: Option<&str>, device: &Device) -> Result<Checkpoint> {
    read(folder, expected, &|bytes| Ok(candle_core::safetensors::load_buffer(bytes, device)?))
        .map_err(|fault| with_fallback(folder, fault))
}

/// Converts a fault to an error; for a damaged checkpoint, adds the newest older one that is intact.
fn with_fallback(folder: &Path, fault: Fault) -> Error {
    match fault {
        Fault::Damaged { file, problem } => {
            let dir = parent(folder);
            let before = folder.file_name().and_then(|name| number(name.to_str()?)).unwrap_or(u64::MAX);
            Error::DamagedCheckpoint { file, problem, good: newest_intact(dir, before).into() }
        }
        Fault::Other(error) => error,
    }
}

enum Fault {
    Damaged { file: PathBuf, problem: String },
    Other(Error),
}

impl Fault {
    /// Classifies a failure to read a file: the checkpoint is damaged if the file is missing or something else is in
    /// its place.
    fn reading(file: &Path, error: std::io::Error) -> Self {
        let problem = match error.kind() {
            ErrorKind::NotFound => "it is missing".to_string(),
            ErrorKind::InvalidInput => error.to_string(),
            ErrorKind::NotADirectory => "its folder is none".to_string(),
            _ if is_loop(&error) => "it is a link that leads back to itself".to_string(),
            _ => return Self::Other(io("read", file)(error)),
        };
        Self::Damaged { file: file.to_path_buf(), problem }
    }
}

/// Whether symbolic links form a loop.
fn is_loop(error: &std::io::Error) -> bool {
    #[cfg(unix)]
    return error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    #[cfg(not(unix))]
    return false;
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Other(error)
    }
}

type Tensors = HashMap<String, Tensor>;

/// Reads all files, checks their hashes, and passes the bytes of each valid file to `parse`.
fn read(
    folder: &Path,
    expected: Option<&str>,
    parse: &dyn Fn(&[u8]) -> Result<Tensors>,
) -> std::result::Result<Checkpoint, Fault> {
    let manifest = manifest(folder, expected)?;
    let mut tensors = BTreeMap::new();
    for (name, hash) in &manifest.tensors {
        let file = folder.join(tensors_file(name));
        let bytes = self::bytes(&file)?;
        let right = check(&bytes, hash).and_then(|()| check_header(&bytes));
        right.map_err(|problem| Fault::Damaged { file, problem })?;
        tensors.insert(name.clone(), parse(&bytes)?);
    }
    let Manifest { epoch, step, sampler, extra, .. } = manifest;
    Ok(Checkpoint { epoch, step, sampler, extra, tensors })
}

/// Reads the manifest, which must have the hash `expected`, if given.
fn manifest(folder: &Path, expected: Option<&str>) -> std::result::Result<Manifest, Fault> {
    let file = folder.join(manifest::FILE);
    let bytes = bytes(&file)?;
    if expected.is_some_and(|expected| manifest::sha256(&bytes) != expected) {
        let problem =
            format!("it does not have the SHA-256 that the file `{LATEST}` beside its folder gives");
        return Err(Fault::Damaged { file, problem });
    }
    Manifest::decode(&bytes).map_err(|problem| Fault::Damaged { file, problem })
}

fn bytes(file: &Path) -> std::result::Result<Vec<u8>, Fault> {
    read_input(file).map_err(|error| Fault::reading(file, error))
}

fn check(bytes: &[u8], hash: &FileHash) -> std::result::Result<(), String> {
    if bytes.len() as u64 != hash.bytes {
        return Err(format!("it has {} bytes, {} were written", bytes.len(), hash.bytes));
    }
    let got = manifest::sha256(bytes);
    if got != hash.sha256 {
        return Err(format!("its SHA-256 is {got}, {} was written", hash.sha256));
    }
    Ok(())
}

fn check_header(bytes: &[u8]) -> std::result::Result<(), String> {
    let header = tensor_header(&mut &bytes[..], bytes.len() as u64);
    header.map(drop).map_err(|problem| format!("it is no safetensors file: {problem}"))
}

/// The newest checkpoint with a number below `before` whose files are all intact.
fn newest_intact(dir: &Path, before: u64) -> Option<PathBuf> {
    let older = numbers(dir).ok()?.into_iter().rev().filter(|&number| number < before);
    older
        .map(|number| dir.join(name(number)))
        .find(|folder| read(folder, None, &|_| Ok(HashMap::new())).is_ok())
}
