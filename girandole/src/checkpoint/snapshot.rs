//! A rank's contribution to a checkpoint: copied at once, or while the next step is computed.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use training::build::Model;
use training::{DeferredCopy, LossScaler, LossScalerState, OptimizerState};

use super::manifest::{NamedPart, OptimizerEntry, Part, model_key, optimizer_key};
use crate::parallel::Piece;
use crate::{Parallel, Result};

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
}

/// A rank's contribution to a checkpoint, to be copied on any thread before the parameters change: forward and backward
/// may run at the same time, and the optimizer must wait.
#[derive(Debug)]
pub struct DeferredSnapshot {
    tensors: Vec<(String, DeferredCopy)>,
    described: SnapshotParts,
}

impl DeferredSnapshot {
    /// Copies the tensors.
    ///
    /// # Errors
    /// Errors of candle, such as a lack of memory.
    pub fn copy(self) -> Result<Snapshot> {
        self.copy_over(&mut SpareTensors::default())
    }

    /// As [`copy`](Self::copy), in the memory of an earlier snapshot, which is taken.
    pub(crate) fn copy_over(self, spares: &mut SpareTensors) -> Result<Snapshot> {
        let mut spares = std::mem::take(spares);
        let copied = self.tensors.into_iter().map(|(key, later)| {
            let spare = spares.remove(&key);
            Ok((key, later.copy_over(spare)?))
        });
        Ok(Snapshot { tensors: copied.collect::<Result<_>>()?, described: self.described })
    }

    /// Returns what [`reserve`] needs to know.
    pub(crate) fn sizes(&self) -> Vec<(String, usize, DType)> {
        let pending = self.tensors.iter().filter(|(_, later)| later.is_pending());
        pending.map(|(key, later)| (key.clone(), later.dims().iter().product(), later.dtype())).collect()
    }
}

/// Tensors of an earlier snapshot, by their keys: the next one is copied over them.
pub(crate) type SpareTensors = HashMap<String, Tensor>;

/// Takes the memory for a first snapshot from the operating system.
pub(crate) fn reserve(sizes: Vec<(String, usize, DType)>) -> candle_core::Result<SpareTensors> {
    // Zeros would take no memory until they are overwritten.
    let ones = |(key, len, dtype)| Ok((key, Tensor::ones(len, dtype, &Device::Cpu)?));
    sizes.into_iter().map(ones).collect()
}

impl<M: Model> Parallel<M> {
    /// Copies this rank's contribution to a checkpoint, for [`Snapshot::write`] while training continues.
    ///
    /// # Errors
    /// An optimizer that was not made from [`named_vars`](Parallel::named_vars).
    pub fn snapshot(&self, optimizer: Option<&dyn OptimizerState>) -> Result<Snapshot> {
        self.snapshot_later(optimizer)?.copy()
    }

    /// Prepares a copy that can be made while forward and backward of the next step run: parameters only change in the
    /// optimizer's step, which must wait for [`DeferredSnapshot::copy`]. Variables that forward changes, such as running
    /// statistics, are copied at once, and so are variables that are not on the CPU.
    ///
    /// # Errors
    /// Those of [`snapshot`](Self::snapshot).
    pub fn snapshot_later(&self, optimizer: Option<&dyn OptimizerState>) -> Result<DeferredSnapshot> {
        let file = format!("rank-{:05}", self.mesh().world().rank());
        self.snapshot_of(file, self.pieces(), optimizer)
    }

    /// Copies what this rank would write if it belonged to the first copy of the model.
    pub(crate) fn snapshot_as_first_copy(&self, optimizer: &dyn OptimizerState) -> Result<Snapshot> {
        let file = format!("{:?}", self.place());
        self.snapshot_of(file, self.pieces_of_copy(0), Some(optimizer))?.copy()
    }

    fn snapshot_of(
        &self,
        file: String,
        pieces: Vec<Piece>,
        optimizer: Option<&dyn OptimizerState>,
    ) -> Result<DeferredSnapshot> {
        let changes: HashSet<String> = self.buffers().into_iter().map(|(name, _)| name).collect();
        let (mut tensors, mut parts, mut remembered) = (Vec::new(), Vec::new(), BTreeMap::new());
        for piece in pieces.iter().filter(|piece| piece.is_described()) {
            if !piece.region.is_empty() {
                let copy = copy_of(piece, changes.contains(&piece.var_name))?;
                tensors.push((model_key(&piece.name), copy));
            }
            let dtype = piece.var.dtype().as_str().to_string();
            let part = Part::of(&file, &piece.region);
            parts.push((piece.name.clone(), piece.region.dims.clone(), dtype, part));
        }
        for (key, value) in optimizer.map_or_else(|| Ok(Vec::new()), OptimizerState::state_later)? {
            let piece = piece_of(&pieces, &key)?;
            // The step count of a parameter with one element has the same shape, but an integer dtype.
            let by_element = value.dims() == piece.var.dims() && value.dtype().is_float();
            if !piece.writes || (by_element && !piece.is_described()) {
                continue;
            }
            let key = format!("{}{}", piece.name, &key[piece.var_name.len()..]);
            if !(by_element && piece.region.is_empty()) {
                // Without padding.
                let value = if by_element { value.first(piece.region.len())? } else { value };
                tensors.push((optimizer_key(&key), value));
            }
            remembered.insert(key, OptimizerEntry { of: piece.name.clone(), by_element });
        }
        let loss_scale = self.loss_scaler().map(LossScaler::state);
        let ties = self.ties_of();
        let described = SnapshotParts { file, parts, optimizer: remembered, ties, loss_scale };
        Ok(DeferredSnapshot { tensors, described })
    }
}

/// Copies the first `len` elements of a tensor to new host memory, because another thread reads it.
fn own(tensor: &Tensor, len: usize) -> candle_core::Result<Tensor> {
    let own = tensor.flatten_all()?.narrow(0, 0, len)?;
    if own.device().is_cpu() { own.force_contiguous() } else { own.to_device(&Device::Cpu) }
}

fn copy_of(piece: &Piece, at_once: bool) -> Result<DeferredCopy> {
    let (tensor, len) = (piece.var.as_detached_tensor(), piece.region.len());
    if at_once || !tensor.device().is_cpu() {
        return Ok(DeferredCopy::done(own(&tensor, len)?));
    }
    Ok(DeferredCopy::new(tensor).first(len)?)
}

/// Returns the piece to which an optimizer's key belongs.
fn piece_of<'a>(pieces: &'a [Piece], key: &str) -> Result<&'a Piece> {
    let is_of = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    let of = pieces.iter().filter(|piece| is_of(&piece.var_name));
    of.max_by_key(|piece| piece.var_name.len()).ok_or_else(|| {
        training::Error::UnownedState { key: key.to_string(), named_vars: "Parallel::named_vars" }.into()
    })
}
