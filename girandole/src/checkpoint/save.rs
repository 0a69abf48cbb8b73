//! Writing: each rank its parts, and one of them the manifest.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use comm::{Communicator, all_agree, broadcast_object, gather_object};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use training::build::Model;
use training::{Checkpoint, Checkpoints, LossScaler, LossScalerState, OptimizerState};

use super::region::Part;
use super::while_others_wait;
use crate::{Error, Parallel, Result};

/// What the manifest keeps, beside what the program wants to keep.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) parameters: BTreeMap<String, Described>,
    /// What the optimizer remembers: as a parameter, all of the same shape.
    pub(super) optimizer: BTreeMap<String, Remembered>,
    /// Names of parameters that are others, too.
    pub(super) ties: HashMap<String, String>,
    /// Where losses are scaled.
    #[serde(default)]
    pub(super) loss_scale: Option<LossScalerState>,
    pub(super) extra: Value,
}

/// A tensor, and where its parts are.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Described {
    pub(super) dims: Vec<usize>,
    pub(super) dtype: String,
    pub(super) parts: Vec<Part>,
}

/// What an optimizer remembers of a parameter.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Remembered {
    /// The parameter.
    pub(super) of: String,
    /// Whether it has a number for each element.
    pub(super) by_element: bool,
}

pub(super) fn model_key(name: &str) -> String {
    format!("model/{name}")
}

pub(super) fn optimizer_key(key: &str) -> String {
    format!("optimizer/{key}")
}

/// What a rank adds to a checkpoint: copies, which later steps do not change.
#[derive(Debug)]
pub struct Snapshot {
    file: String,
    tensors: HashMap<String, Tensor>,
    /// Name, shape, dtype and part of each parameter.
    parts: Vec<(String, Vec<usize>, String, Part)>,
    optimizer: BTreeMap<String, Remembered>,
    ties: HashMap<String, String>,
    loss_scale: Option<LossScalerState>,
}

impl<M: Model> Parallel<M> {
    /// Writes a checkpoint of what is trained: each rank its parts of the parameters and of what the optimizer remembers, and how losses are
    /// scaled. To be called on every rank, with the same folder, which all must see. Rank 0's `checkpoint` has whatever else is kept; its sets of tensors are written
    /// as well.
    ///
    /// A crash at any moment leaves the last checkpoint as it was, or the new one whole.
    ///
    /// # Memory
    /// A copy of this rank's parts, and of the optimizer's state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint as it was: a file that cannot be written; an optimizer that was not made from
    /// [`named_vars`](Parallel::named_vars); failures of communication.
    pub fn save(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let world = &**self.mesh().world();
        let snapshot = agreed(world, self.snapshot(optimizer))?;
        snapshot.write(world, checkpoints, checkpoint)
    }

    /// A copy of what this rank adds to a checkpoint, for [`Snapshot::write`] while training goes on.
    ///
    /// # Errors
    /// An optimizer that was not made from [`named_vars`](Parallel::named_vars).
    pub fn snapshot(&self, optimizer: Option<&dyn OptimizerState>) -> Result<Snapshot> {
        let file = format!("rank-{:05}", self.mesh().world().rank());
        let pieces = self.pieces();
        let (mut tensors, mut parts, mut remembered) = (HashMap::new(), Vec::new(), BTreeMap::new());
        // In the memory of the host, where another thread reads it.
        let own = |tensor: &Tensor, len: usize| {
            let own = tensor.flatten_all()?.narrow(0, 0, len)?;
            if own.device().is_cpu() { own.force_contiguous() } else { own.to_device(&Device::Cpu) }
        };
        for piece in pieces.iter().filter(|piece| piece.writes && !piece.region.is_empty()) {
            let len = piece.region.len();
            tensors.insert(model_key(&piece.name), own(&piece.var.as_detached_tensor(), len)?);
            let dtype = piece.var.dtype().as_str().to_string();
            let part = Part::of(&file, &piece.region);
            parts.push((piece.name.clone(), piece.region.dims.clone(), dtype, part));
        }
        for (key, value) in optimizer.map_or_else(|| Ok(Vec::new()), OptimizerState::state)? {
            let is_of = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
            let of = pieces.iter().filter(|piece| is_of(&piece.var_name));
            let Some(piece) = of.max_by_key(|piece| piece.var_name.len()) else {
                let help =
                    "make the optimizer from Parallel::named_vars, so that it is known whose part this is";
                return Err(Error::invalid("what the optimizer remembers", key, help));
            };
            // Not the count of its steps, where the parameter is one number as well.
            let by_element = value.dims() == piece.var.dims() && value.dtype().is_float();
            if !piece.writes || (by_element && piece.region.is_empty()) {
                continue;
            }
            // It is a copy already.
            let value = match by_element && value.elem_count() != piece.region.len() {
                true => own(&value, piece.region.len())?,
                false => value.flatten_all()?.reshape(if by_element {
                    vec![value.elem_count()]
                } else {
                    vec![]
                })?,
            };
            let key = format!("{}{}", piece.name, &key[piece.var_name.len()..]);
            tensors.insert(optimizer_key(&key), value);
            remembered.insert(key, Remembered { of: piece.name.clone(), by_element });
        }
        let loss_scale = self.loss_scaler().map(LossScaler::state);
        Ok(Snapshot { file, tensors, parts, optimizer: remembered, ties: self.ties_of(), loss_scale })
    }
}

impl Snapshot {
    /// Bytes of the copies.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        self.tensors.values().map(bytes).sum()
    }

    /// Writes it; to be called on every rank of `world`, which may be a group of its own, so that training goes on beside it.
    ///
    /// # Errors
    /// Those of [`Parallel::save`].
    pub fn write(
        self,
        world: &dyn Communicator,
        checkpoints: &Checkpoints,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let is_first = world.rank() == 0;
        let begun = match is_first {
            true => checkpoints.begin().map(|draft| draft.number()).map_err(Error::from),
            false => Ok(0),
        };
        let number = broadcast_object(world, &agreed(world, begun)?, 0)?;
        let draft = checkpoints.draft(number);
        let folder = draft.folder();
        let (file, tensors) = (&self.file, &self.tensors);
        let written = while_others_wait(world, || {
            if tensors.is_empty() {
                return Ok(None);
            }
            Ok(Some((file.clone(), draft.write(file, tensors)?)))
        })?;
        let all = gather_object(world, &(written, self.parts, self.optimizer), 0)?;
        let mut committed = Ok(());
        if let Some(all) = all {
            let (mut manifest, mut files) = (Manifest::default(), BTreeMap::new());
            (manifest.extra, manifest.ties) = (checkpoint.extra.clone(), self.ties);
            manifest.loss_scale = self.loss_scale;
            for (file, parts, optimizer) in all {
                files.extend(file);
                manifest.optimizer.extend(optimizer);
                for (name, dims, dtype, part) in parts {
                    let described = Described { dims, dtype, parts: Vec::new() };
                    manifest.parameters.entry(name).or_insert(described).parts.push(part);
                }
            }
            let extra = serde_json::to_value(&manifest).map_err(|error| Error::file(&folder, error));
            let commit = |extra| draft.commit(&Checkpoint { extra, ..checkpoint.clone() }, files);
            committed = extra.and_then(|extra| Ok(commit(extra).map(drop)?));
        }
        agreed(world, committed)?;
        Ok(folder)
    }
}

/// What fails on one rank fails on all.
pub(crate) fn agreed<T>(world: &dyn Communicator, own: Result<T>) -> Result<T> {
    all_agree([world], own, |rank, reason| Error::PeerFailed { rank, reason })
}
