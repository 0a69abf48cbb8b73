//! A rank's contribution to a checkpoint: copied at once, or while the next step is computed.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use training::{DeferredCopy, LossScalerState, OptimizerState};

use super::manifest::{NamedPart, OptimizerEntry, Part, model_key, optimizer_key};
use crate::{DistributedModel, Piece, Result};

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
    /// `None` without an optimizer.
    pub(super) optimizer: Option<BTreeMap<String, OptimizerEntry>>,
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
    pub fn into_spares(self) -> SpareTensors {
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
    ///
    /// # Errors
    /// Those of [`copy`](Self::copy).
    pub fn copy_over(self, spares: &mut SpareTensors) -> Result<Snapshot> {
        let mut spares = std::mem::take(spares);
        let copied = self.tensors.into_iter().map(|(key, later)| {
            let spare = spares.remove(&key);
            Ok((key, later.copy_over(spare)?))
        });
        Ok(Snapshot { tensors: copied.collect::<Result<_>>()?, described: self.described })
    }

    /// Returns what [`reserve`] needs to know.
    pub fn sizes(&self) -> Vec<(String, usize, DType)> {
        let pending = self.tensors.iter().filter(|(_, later)| later.is_pending());
        pending.map(|(key, later)| (key.clone(), later.dims().iter().product(), later.dtype())).collect()
    }
}

/// Tensors of an earlier snapshot, by their keys: the next one is copied over them.
pub type SpareTensors = HashMap<String, Tensor>;

/// Takes the memory for a first snapshot from the operating system.
///
/// # Errors
/// A lack of memory.
pub fn reserve(sizes: Vec<(String, usize, DType)>) -> candle_core::Result<SpareTensors> {
    // Zeros would take no memory until they are overwritten.
    let ones = |(key, len, dtype)| Ok((key, Tensor::ones(len, dtype, &Device::Cpu)?));
    sizes.into_iter().map(ones).collect()
}

impl DeferredSnapshot {
    /// Prepares what a rank contributes to a checkpoint, under this name; `writes`: whether its copy of the model is the one
    /// that is written.
    ///
    /// # Errors
    /// An optimizer that was not made from the model's named variables.
    pub fn of<M: DistributedModel + ?Sized>(
        model: &M,
        file: String,
        writes: bool,
        optimizer: Option<&dyn OptimizerState>,
    ) -> std::result::Result<Self, M::Error> {
        let pieces = model.pieces()?;
        let (mut tensors, mut parts) = (Vec::new(), Vec::new());
        for piece in pieces.iter().filter(|piece| writes && piece.is_described()) {
            if !piece.region.is_empty() {
                tensors.push((model_key(&piece.name), copy_of(piece)?));
            }
            let dtype = piece.var.dtype().as_str().to_string();
            let part = Part::of(&file, &piece.region);
            parts.push((piece.name.clone(), piece.region.dims.clone(), dtype, part));
        }
        let state = optimizer.map(|optimizer| optimizer.state_later()).transpose()?;
        let mut optimizer = state.as_ref().map(|_| BTreeMap::new());
        for (key, value) in state.into_iter().flatten() {
            let piece = piece_of(&pieces, &key, M::NAMED_VARS)?;
            // The step count of a parameter with one element has the same shape, but an integer dtype.
            let by_element = value.dims() == piece.var.dims() && value.dtype().is_float();
            if !writes || !piece.is_first || (by_element && !piece.is_described()) {
                continue;
            }
            let key = format!("{}{}", piece.name, &key[piece.var_name.len()..]);
            if !(by_element && piece.region.is_empty()) {
                // Without padding.
                let value = if by_element {
                    value.first(piece.region.len()).map_err(crate::Error::from)?
                } else {
                    value
                };
                tensors.push((optimizer_key(&key), value));
            }
            let entry = OptimizerEntry { of: piece.name.clone(), by_element };
            optimizer.get_or_insert_default().insert(key, entry);
        }
        let (ties, loss_scale) = (model.ties(), model.loss_scale());
        let described = SnapshotParts { file, parts, optimizer, ties, loss_scale };
        Ok(Self { tensors, described })
    }
}

/// Copies the first `len` elements of a tensor to new host memory, because another thread reads it.
fn own(tensor: &Tensor, len: usize) -> candle_core::Result<Tensor> {
    let own = tensor.flatten_all()?.narrow(0, 0, len)?;
    if own.device().is_cpu() { own.force_contiguous() } else { own.to_device(&Device::Cpu) }
}

fn copy_of(piece: &Piece) -> Result<DeferredCopy> {
    let (tensor, len) = (piece.var.as_detached_tensor(), piece.region.len());
    if piece.is_buffer || !tensor.device().is_cpu() {
        return Ok(DeferredCopy::done(own(&tensor, len)?));
    }
    Ok(DeferredCopy::new(tensor).first(len)?)
}

/// Returns the piece to which an optimizer's key belongs.
fn piece_of<'a>(pieces: &'a [Piece], key: &str, named_vars: &'static str) -> Result<&'a Piece> {
    let is_of = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    let of = pieces.iter().filter(|piece| is_of(&piece.var_name));
    of.max_by_key(|piece| piece.var_name.len())
        .ok_or_else(|| training::Error::UnownedState { key: key.to_string(), named_vars }.into())
}
