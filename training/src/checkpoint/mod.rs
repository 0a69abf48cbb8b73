//! Checkpoints: one folder each, complete or absent.

mod claim;
mod draft;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod manifest;
mod read;
mod write;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use serde_json::Value;

use crate::{Error, Result};
use ops::kernels::lock;

use claim::Claim;

pub use draft::Draft;
#[cfg(any(test, fuzzing))]
pub use fuzz::fuzz_manifest;
pub use manifest::FileHash;
pub use read::Contents;

/// Prefix of a checkpoint folder's name; the number follows.
const PREFIX: &str = "checkpoint-";

/// State that a run needs to resume.
///
/// Model and optimizer are sets of tensors, one safetensors file each; the rest is one JSON file. PyTorch can read a
/// model's file directly if the tensors have PyTorch's names.
#[derive(Debug, Clone, Default)]
pub struct Checkpoint {
    /// The epoch, in the program's own counting.
    pub epoch: u64,
    /// Steps done.
    pub step: u64,
    /// The sampler's state, as JSON ([`sampler::SamplerState`] can be converted to and from it). Default null.
    pub sampler: Value,
    /// Anything else the program saves, such as the learning rate or the best accuracy. Default null. A float that
    /// must be restored to the last bit is stored as its bits ([`f64::to_bits`]): JSON decimals are read to within
    /// one unit in the last place.
    pub extra: Value,
    /// Sets of tensors by name, such as `model`, `optimizer`. A name consists of letters, digits, `-` and `_`.
    pub tensors: BTreeMap<String, HashMap<String, Tensor>>,
}

/// Where checkpoints are stored, and how many are kept.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointConfig {
    /// The folder that holds them; it is created if missing. Must be set: empty by default.
    pub dir: PathBuf,
    /// Number of checkpoints kept, 1 or more: older ones are removed once a new one is safely on disk. Default 2.
    pub keep: usize,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self { dir: PathBuf::new(), keep: 2 }
    }
}

/// A folder of checkpoints.
///
/// Each checkpoint is a folder `checkpoint-00000001` with one `NAME.safetensors` for each set of tensors and
/// `checkpoint.json`, which has the SHA-256 of each file and of itself. The file `latest` names the one to resume
/// from.
///
/// After a crash at any moment, either the last checkpoint is intact or the new one is complete: a new one is written
/// and synced to disk (fsync) under a temporary name before it is renamed, and `latest` is then replaced atomically.
///
/// While a run writes there, another one gets [`Error::InUse`], see [`claim`](Self::claim).
///
/// One process writes: rank 0, while the others wait at a barrier. Or each process writes a file of its own, see
/// [`Draft`]. All may read.
///
/// # Cost
/// Writing: the tensors' bytes to disk, read back once for their hashes, and two disk syncs per file. Reading: once,
/// into memory.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use training::{Checkpoint, CheckpointConfig, Checkpoints};
///
/// # let folder = tempfile::tempdir()?;
/// let config = CheckpointConfig { dir: folder.path().join("run"), ..CheckpointConfig::default() };
/// let checkpoints = Checkpoints::open(config)?;
/// assert!(checkpoints.load_latest(&Device::Cpu)?.is_none());
///
/// let weight = Tensor::ones(3, DType::F32, &Device::Cpu)?;
/// let model = [("fc.weight".to_string(), weight)].into();
/// let checkpoint = Checkpoint { epoch: 1, step: 600, ..Checkpoint::default() };
/// checkpoints.save(&Checkpoint { tensors: [("model".to_string(), model)].into(), ..checkpoint })?;
///
/// let loaded = checkpoints.load_latest(&Device::Cpu)?.ok_or("nothing there")?;
/// assert_eq!((loaded.epoch, loaded.step), (1, 600));
/// assert_eq!(loaded.tensors["model"]["fc.weight"].to_vec1::<f32>()?, [1.0; 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoints {
    config: CheckpointConfig,
    /// Keeps other runs from writing there; shared by clones.
    claim: Arc<Mutex<Option<Arc<Claim>>>>,
    /// Step from which on none is removed; shared by clones.
    kept_from: Arc<Mutex<Option<u64>>>,
}

impl Checkpoints {
    /// Prefix of temporary names in the folder: the next save removes what has it.
    pub const UNFINISHED: &str = ".unfinished-";

    /// Opens the folder, and creates it if missing.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] if `keep` is 0, [`Error::Io`].
    pub fn open(config: CheckpointConfig) -> Result<Self> {
        if config.keep == 0 {
            let help = "one at least must be kept";
            return Err(Error::InvalidConfig { of: "CheckpointConfig", field: "keep", got: 0.0, help });
        }
        std::fs::create_dir_all(&config.dir).map_err(io("make the folder", &config.dir))?;
        Ok(Self { config, claim: Arc::default(), kept_from: Arc::default() })
    }

    /// From now on, the newest checkpoint of this step and those after it are not removed, however many there are; none is if there is
    /// no such checkpoint. For those that are needed beside checkpoints of the same step in other folders, until later ones are
    /// written there. Shared by clones.
    pub fn keep_from(&self, step: u64) {
        *lock(&self.kept_from) = Some(step);
    }

    /// Number of the first checkpoint that is not removed, however many there are.
    fn kept_from(&self) -> Result<u64> {
        let Some(step) = *lock(&self.kept_from) else { return Ok(u64::MAX) };
        let dir = &self.config.dir;
        let is_it = |number: &u64| {
            let contents = read::contents(&dir.join(name(*number)), None);
            contents.is_ok_and(|contents| contents.step == step)
        };
        Ok(numbers(dir)?.into_iter().rev().find(is_it).unwrap_or(0))
    }

    /// Writes a checkpoint, makes it the latest, and returns its folder.
    ///
    /// # Errors
    /// [`Error::InUse`], [`Error::Io`], [`Error::InvalidName`], candle's. The latest checkpoint is then unchanged, unless only the
    /// removal of old ones failed.
    pub fn save(&self, checkpoint: &Checkpoint) -> Result<PathBuf> {
        self.claim()?;
        write::save(&self.config, self.kept_from()?, checkpoint, &|_| Ok(()))
    }

    /// Folders of all checkpoints, oldest first.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn list(&self) -> Result<Vec<PathBuf>> {
        let all = numbers(&self.config.dir)?;
        Ok(all.into_iter().map(|number| self.config.dir.join(name(number))).collect())
    }

    /// Identifies the latest checkpoint: a string that changes with each save, `None` if there is no checkpoint. The
    /// checkpoint itself is not read, and may be damaged.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn mark(&self) -> Result<Option<String>> {
        read::mark(&self.config.dir)
    }

    /// Reads the checkpoint that `latest` names, or the newest one if that file is missing; `None` if there is no
    /// checkpoint.
    ///
    /// # Errors
    /// [`Error::DamagedCheckpoint`] names the file that has changed since it was written, and the newest older
    /// checkpoint that is intact. Others as [`load`](Self::load).
    pub fn load_latest(&self, device: &Device) -> Result<Option<Checkpoint>> {
        read::latest(&self.config.dir, device)
    }

    /// Reads the checkpoint in this folder, one of [`list`](Self::list).
    ///
    /// # Errors
    /// [`Error::DamagedCheckpoint`], [`Error::Io`], candle's.
    pub fn load(&self, folder: &Path, device: &Device) -> Result<Checkpoint> {
        read::checkpoint(folder, None, device)
    }

    /// Contents of the checkpoint that [`load_latest`](Self::load_latest) would read, without its tensors.
    ///
    /// # Errors
    /// [`Error::DamagedCheckpoint`] if its manifest has changed since it was written, [`Error::Io`].
    pub fn latest(&self) -> Result<Option<Contents>> {
        read::latest_contents(&self.config.dir)
    }

    /// Contents of the checkpoint in this folder, without its tensors.
    ///
    /// # Errors
    /// Errors of [`latest`](Self::latest).
    pub fn contents(&self, folder: &Path) -> Result<Contents> {
        read::contents(folder, None)
    }
}

fn name(number: u64) -> String {
    format!("{PREFIX}{number:08}")
}

fn number(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.parse().ok().filter(|&n| self::name(n) == name)
}

/// Numbers of all checkpoints in a folder, in ascending order.
fn numbers(dir: &Path) -> Result<Vec<u64>> {
    let mut found = vec![];
    for entry in std::fs::read_dir(dir).map_err(io("list", dir))? {
        let entry = entry.map_err(io("list", dir))?;
        found.extend(entry.file_name().to_str().and_then(number));
    }
    found.sort_unstable();
    Ok(found)
}

fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::Io { action, path, source }
}

#[cfg(test)]
mod tests;
