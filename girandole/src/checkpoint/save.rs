//! Writes checkpoints: each rank writes its parts, and rank 0 the manifest.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::Tensor;
use comm::{Communicator, all_agree, complete_together};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::build::Model;
use training::{Checkpoint, Checkpoints, FileHash, LossScalerState, OptimizerState};

use super::region::Part;
use super::{SpareTensors, with_keep_alive};
use crate::{Error, Parallel, Result};

/// Content of the manifest: describes all parts, and holds the program's own data.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) parameters: BTreeMap<String, TensorEntry>,
    /// State of the optimizer, by key; each is a tensor divided like its parameter, or one value.
    pub(super) optimizer: BTreeMap<String, OptimizerEntry>,
    /// For each tied parameter the name of the parameter that it is tied to.
    pub(super) ties: HashMap<String, String>,
    /// State of the loss scaler, if losses are scaled.
    #[serde(default)]
    pub(super) loss_scale: Option<LossScalerState>,
    pub(super) extra: Value,
}

impl Manifest {
    /// Adds what one rank contributes.
    pub(super) fn add(&mut self, parts: Vec<NamedPart>, optimizer: BTreeMap<String, OptimizerEntry>) {
        self.optimizer.extend(optimizer);
        for (name, dims, dtype, part) in parts {
            let described = TensorEntry { dims, dtype, parts: Vec::new() };
            self.parameters.entry(name).or_insert(described).parts.push(part);
        }
    }
}

/// Name, shape and dtype of a parameter, and the part of it that a rank holds.
pub(super) type NamedPart = (String, Vec<usize>, String, Part);

/// Shape, dtype and parts of a tensor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TensorEntry {
    pub(super) dims: Vec<usize>,
    pub(super) dtype: String,
    pub(super) parts: Vec<Part>,
}

/// One piece of optimizer state.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct OptimizerEntry {
    /// Name of the parameter to which it belongs.
    pub(super) of: String,
    /// Whether it has one value for each element of the parameter.
    pub(super) by_element: bool,
}

pub(super) fn model_key(name: &str) -> String {
    format!("model/{name}")
}

pub(super) fn optimizer_key(key: &str) -> String {
    format!("optimizer/{key}")
}

/// One rank's contribution to a checkpoint: copies, which later steps do not change.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) tensors: HashMap<String, Tensor>,
    pub(super) described: SnapshotParts,
}

/// The manifest entries of one rank's tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SnapshotParts {
    pub(super) file: String,
    pub(super) parts: Vec<NamedPart>,
    pub(super) optimizer: BTreeMap<String, OptimizerEntry>,
    pub(super) ties: HashMap<String, String>,
    pub(super) loss_scale: Option<LossScalerState>,
}

impl<M: Model> Parallel<M> {
    /// Writes a checkpoint of the trained state: each rank writes its parts of the parameters and of the optimizer
    /// state; the manifest holds the loss scale. Call on every rank, with the same folder, which all ranks must see.
    /// Rank 0's `checkpoint` holds everything else that is stored, including additional tensor sets.
    ///
    ///
    /// A crash at any moment leaves either the last checkpoint intact or the new one complete.
    ///
    /// # Memory
    /// A copy of this rank's parts and of the optimizer state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint unchanged: a file that cannot be written; an optimizer that was not
    /// made from [`named_vars`](Parallel::named_vars); failures of communication.
    pub fn save(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let world = &**self.mesh().world();
        let snapshot = all_or_error(world, self.snapshot(optimizer))?;
        snapshot.write(world, checkpoints, checkpoint)
    }
}

impl Snapshot {
    /// Size of the copies in bytes.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.tensors.values().map(bytes).sum()
    }

    /// Returns the memory of the copies, for the next snapshot.
    pub(crate) fn into_spares(self) -> SpareTensors {
        self.tensors
    }

    /// Writes the snapshot. Call on every rank of `world`, which may be a separate group, so that training continues at
    /// the same time.
    ///
    /// # Errors
    /// Those of [`Parallel::save`].
    pub fn write(
        &self,
        world: &dyn Communicator,
        checkpoints: &Checkpoints,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let SnapshotParts { file, parts, optimizer, ties, loss_scale } = self.described.clone();
        let part = |number: &u64| {
            let write = || match self.tensors.is_empty() {
                true => Ok(None),
                false => Ok(Some((file.clone(), checkpoints.draft(*number).write(&file, &self.tensors)?))),
            };
            Ok((with_keep_alive(world, write)?, parts, optimizer))
        };
        let complete = |number: &u64, all: Vec<(Option<(String, FileHash)>, _, _)>| {
            let mut files = BTreeMap::new();
            let mut manifest =
                Manifest { ties, loss_scale, extra: checkpoint.extra.clone(), ..Manifest::default() };
            for (file, parts, optimizer) in all {
                files.extend(file);
                manifest.add(parts, optimizer);
            }
            let draft = checkpoints.draft(*number);
            let extra =
                serde_json::to_value(&manifest).map_err(|error| Error::file(&draft.folder(), error))?;
            Ok(draft.commit(&Checkpoint { extra, ..checkpoint.clone() }, files).map(drop)?)
        };
        let begin = || Ok(checkpoints.begin()?.number());
        let number = complete_together(&[world], begin, part, complete, peer_failed)?;
        Ok(checkpoints.draft(number).folder())
    }
}

/// Returns an error on all ranks if one rank failed.
pub(crate) fn all_or_error<T>(world: &dyn Communicator, own: Result<T>) -> Result<T> {
    all_agree([world], own, peer_failed)
}

fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFailed { rank, reason }
}
