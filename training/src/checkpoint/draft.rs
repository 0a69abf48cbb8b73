//! Drafts: checkpoints that several processes write.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::Tensor;

use super::{Checkpoint, Checkpoints, FileHash, name, write};
use crate::Result;

/// A checkpoint that is being written and does not count yet. After a crash, the next save removes its files.
///
/// One process begins it and sends its number to the others; each writes files under names of its own; the one that
/// began it commits it with the hashes of all files, once all are written. All processes must see the same folder.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use training::{Checkpoint, CheckpointConfig, Checkpoints};
///
/// # let folder = tempfile::tempdir()?;
/// let config = CheckpointConfig { dir: folder.path().join("run"), ..CheckpointConfig::default() };
/// let checkpoints = Checkpoints::open(config)?;
/// let draft = checkpoints.begin()?;
/// let part = [("w".to_string(), Tensor::ones(3, DType::F32, &Device::Cpu)?)].into();
/// let hash = checkpoints.draft(draft.number()).write("rank-1", &part)?; // on another rank
/// assert!(checkpoints.latest()?.is_none());
/// draft.commit(&Checkpoint { step: 7, ..Checkpoint::default() }, [("rank-1".to_string(), hash)].into())?;
///
/// let contents = checkpoints.latest()?.ok_or("nothing there")?;
/// assert_eq!(contents.step, 7);
/// contents.check("rank-1")?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Draft<'a> {
    checkpoints: &'a Checkpoints,
    number: u64,
}

impl Checkpoints {
    /// Begins a checkpoint that several processes will write. One of them calls this.
    ///
    /// # Errors
    /// [`crate::Error::InUse`], [`crate::Error::Io`].
    pub fn begin(&self) -> Result<Draft<'_>> {
        self.claim()?;
        Ok(self.draft(write::begin(&self.config, &|_| Ok(()))?))
    }

    /// Returns the draft with this number, which another process has begun.
    pub fn draft(&self, number: u64) -> Draft<'_> {
        Draft { checkpoints: self, number }
    }
}

impl Draft<'_> {
    /// Its number, which other processes pass to [`Checkpoints::draft`].
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The folder it will have once committed.
    pub fn folder(&self) -> PathBuf {
        self.checkpoints.config.dir.join(name(self.number))
    }

    /// Writes a set of tensors, under a name that no other process uses, and syncs it to disk.
    ///
    /// # Errors
    /// [`crate::Error::Io`], [`crate::Error::InvalidName`], candle's.
    pub fn write(&self, name: &str, tensors: &HashMap<String, Tensor>) -> Result<FileHash> {
        write::file(&self.checkpoints.config, self.number, name, tensors, &|_| Ok(()))
    }

    /// Commits it as a checkpoint, makes it the latest, and returns its folder. `files` are the hashes of all files
    /// written; the tensors of `checkpoint` itself are written as well.
    ///
    /// # Errors
    /// Errors of [`Checkpoints::save`].
    pub fn commit(self, checkpoint: &Checkpoint, mut files: BTreeMap<String, FileHash>) -> Result<PathBuf> {
        for (name, tensors) in &checkpoint.tensors {
            files.insert(name.clone(), self.write(name, tensors)?);
        }
        let Checkpoints { config, .. } = self.checkpoints;
        write::commit(config, self.checkpoints.kept_from()?, self.number, checkpoint, files, &|_| Ok(()))
    }
}
