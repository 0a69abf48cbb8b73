//! Copies a rank's contribution to a checkpoint, at once or while the next step is computed.

use std::collections::{BTreeMap, HashSet};

use candle_core::{Device, Tensor};
use training::build::Model;
use training::{DeferredCopy, LossScaler, OptimizerState};

use super::region::Part;
use super::save::{OptimizerEntry, Snapshot, SnapshotParts, model_key, optimizer_key};
use crate::parallel::Piece;
use crate::{Error, Parallel, Result};

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
        let copied = self.tensors.into_iter().map(|(key, later)| Ok((key, later.copy()?)));
        Ok(Snapshot { tensors: copied.collect::<Result<_>>()?, described: self.described })
    }
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
                tensors.push((optimizer_key(&key), cut(value, by_element.then(|| piece.region.len()))));
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
    Ok(DeferredCopy::new(&len.into(), tensor.dtype(), move || own(&tensor, len)))
}

/// Returns the piece to which an optimizer's key belongs.
fn piece_of<'a>(pieces: &'a [Piece], key: &str) -> Result<&'a Piece> {
    let is_of = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    let of = pieces.iter().filter(|piece| is_of(&piece.var_name));
    of.max_by_key(|piece| piece.var_name.len()).ok_or_else(|| {
        let help = "make the optimizer from Parallel::named_vars, so that it is known whose part this is";
        Error::invalid("the optimizer's state", key, help)
    })
}

/// Returns optimizer state as stored in a checkpoint: as many elements as the part has, without padding, or one value.
fn cut(value: DeferredCopy, elements: Option<usize>) -> DeferredCopy {
    let (count, dtype) = (value.dims().iter().product::<usize>(), value.dtype());
    match elements {
        Some(len) => DeferredCopy::new(&len.into(), dtype, move || {
            let value = value.copy()?;
            // `copy` has already made a copy.
            if count == len { value.flatten_all() } else { own(&value, len) }
        }),
        None => DeferredCopy::new(&().into(), dtype, move || value.copy()?.flatten_all()?.reshape(())),
    }
}
