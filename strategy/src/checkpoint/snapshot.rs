//! A rank's contribution to a checkpoint: copied at once, or while the next step is computed.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use training::{DeferredCopy, LossScalerState, OptimizerState};

use super::shard_index::{NamedPart, OptimizerEntry, Part, model_key, optimizer_key};
use crate::{DistributedModel, ModelCopy, Piece, Result};

/// One rank's contribution to a checkpoint: copies, which later steps do not change.
#[derive(Debug)]
pub struct Snapshot {
    pub(super) tensors: HashMap<String, Tensor>,
    pub(super) described: SnapshotParts,
}

/// The index's entries of one rank's tensors.
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
    /// Prepares what a rank contributes to a checkpoint, under this name: of the pieces that it is the first in its copy of the
    /// model to hold, the share of this copy.
    ///
    /// # Errors
    /// An optimizer that was not made from the model's named variables.
    pub fn of<M: DistributedModel + ?Sized>(
        model: &M,
        file: String,
        copy: ModelCopy,
        optimizer: Option<&dyn OptimizerState>,
    ) -> std::result::Result<Self, M::Error> {
        let pieces = model.pieces()?;
        let shares = copy.shares(&pieces);
        let (mut tensors, mut parts) = (Vec::new(), Vec::new());
        for (piece, share) in pieces.iter().zip(&shares) {
            let Some(share) = share else { continue };
            if !share.is_empty() {
                tensors.push((model_key(&piece.name), copy_of(piece, share)?));
            }
            let dtype = piece.var.dtype().as_str().to_string();
            let part = Part::of(&file, &piece.region.within(share));
            parts.push((piece.name.clone(), piece.region.dims.clone(), dtype, part));
        }
        let state = optimizer.map(|optimizer| optimizer.state_later()).transpose()?;
        let mut optimizer = state.as_ref().map(|_| BTreeMap::new());
        for (key, value) in state.into_iter().flatten() {
            let place = place_of(&pieces, &key, M::NAMED_VARS)?;
            let (piece, share) = (&pieces[place], &shares[place]);
            // The step count of a parameter with one element has the same shape, but an integer dtype.
            let by_element = value.dims() == piece.var.dims() && value.dtype().is_float();
            let key = format!("{}{}", piece.name, &key[piece.var_name.len()..]);
            let value = match share {
                // Without padding.
                Some(share) if by_element && !share.is_empty() => {
                    Some(value.range(share.clone()).map_err(crate::Error::from)?)
                }
                Some(_) if by_element => None,
                // One value for all elements is written with the first of them.
                Some(share) if share.start == 0 => Some(value),
                _ => continue,
            };
            tensors.extend(value.map(|value| (optimizer_key(&key), value)));
            let entry = OptimizerEntry { of: piece.name.clone(), by_element };
            optimizer.get_or_insert_default().insert(key, entry);
        }
        let (ties, loss_scale) = (model.ties(), model.loss_scale());
        let described = SnapshotParts { file, parts, optimizer, ties, loss_scale };
        Ok(Self { tensors, described })
    }
}

/// Copies a range of the elements of a tensor to new host memory, because another thread reads it.
fn own(tensor: &Tensor, range: &Range<usize>) -> candle_core::Result<Tensor> {
    let own = tensor.flatten_all()?.narrow(0, range.start, range.len())?;
    if own.device().is_cpu() { own.force_contiguous() } else { own.to_device(&Device::Cpu) }
}

fn copy_of(piece: &Piece, range: &Range<usize>) -> Result<DeferredCopy> {
    let tensor = piece.var.as_detached_tensor();
    if piece.is_buffer || !tensor.device().is_cpu() {
        return Ok(DeferredCopy::done(own(&tensor, range)?));
    }
    Ok(DeferredCopy::new(tensor).range(range.clone())?)
}

/// Returns the place of the piece to which an optimizer's key belongs.
fn place_of(pieces: &[Piece], key: &str, named_vars: &'static str) -> Result<usize> {
    let is_of = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    let of = pieces.iter().enumerate().filter(|(_, piece)| is_of(&piece.var_name));
    of.max_by_key(|(_, piece)| piece.var_name.len())
        .map(|(place, _)| place)
        .ok_or_else(|| training::Error::UnownedState { key: key.to_string(), named_vars }.into())
}
