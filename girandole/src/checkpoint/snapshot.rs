//! What a rank adds to a checkpoint: copied at once, or while the next step is computed.

use std::collections::{BTreeMap, HashSet};

use candle_core::{Device, Tensor};
use training::build::Model;
use training::{CopyLater, LossScaler, OptimizerState};

use super::region::Part;
use super::save::{Remembered, Snapshot, SnapshotParts, model_key, optimizer_key};
use crate::parallel::Piece;
use crate::{Error, Parallel, Result};

/// What a rank adds to a checkpoint, to be copied on any thread before its parameters change: forward and backward may run meanwhile, and
/// the optimizer must wait.
#[derive(Debug)]
pub struct SnapshotLater {
    tensors: Vec<(String, CopyLater)>,
    described: SnapshotParts,
}

impl SnapshotLater {
    /// Copies it.
    ///
    /// # Errors
    /// candle's, where there is no memory.
    pub fn copy(self) -> Result<Snapshot> {
        let copied = self.tensors.into_iter().map(|(key, later)| Ok((key, later.copy()?)));
        Ok(Snapshot { tensors: copied.collect::<Result<_>>()?, described: self.described })
    }
}

impl<M: Model> Parallel<M> {
    /// A copy of what this rank adds to a checkpoint, for [`Snapshot::write`] while training goes on.
    ///
    /// # Errors
    /// An optimizer that was not made from [`named_vars`](Parallel::named_vars).
    pub fn snapshot(&self, optimizer: Option<&dyn OptimizerState>) -> Result<Snapshot> {
        self.snapshot_later(optimizer)?.copy()
    }

    /// The same to be copied while the next step's forward and backward run: parameters change with the optimizer's step alone, which must
    /// wait for [`SnapshotLater::copy`]. What forward changes, such as running statistics, is copied at once; so is what is on another
    /// device than the CPU.
    ///
    /// # Errors
    /// Those of [`snapshot`](Self::snapshot).
    pub fn snapshot_later(&self, optimizer: Option<&dyn OptimizerState>) -> Result<SnapshotLater> {
        let file = format!("rank-{:05}", self.mesh().world().rank());
        let pieces = self.pieces();
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
            // Not the count of its steps, where the parameter is one number as well.
            let by_element = value.dims() == piece.var.dims() && value.dtype().is_float();
            if !piece.writes || (by_element && !piece.is_described()) {
                continue;
            }
            let key = format!("{}{}", piece.name, &key[piece.var_name.len()..]);
            if !(by_element && piece.region.is_empty()) {
                tensors.push((optimizer_key(&key), cut(value, by_element.then(|| piece.region.len()))));
            }
            remembered.insert(key, Remembered { of: piece.name.clone(), by_element });
        }
        let loss_scale = self.loss_scaler().map(LossScaler::state);
        let ties = self.ties_of();
        let described = SnapshotParts { file, parts, optimizer: remembered, ties, loss_scale };
        Ok(SnapshotLater { tensors, described })
    }
}

/// The first elements of a tensor, in memory of their own: of the host, where another thread reads it.
fn own(tensor: &Tensor, len: usize) -> candle_core::Result<Tensor> {
    let own = tensor.flatten_all()?.narrow(0, 0, len)?;
    if own.device().is_cpu() { own.force_contiguous() } else { own.to_device(&Device::Cpu) }
}

fn copy_of(piece: &Piece, at_once: bool) -> Result<CopyLater> {
    let (tensor, len) = (piece.var.as_detached_tensor(), piece.region.len());
    if at_once || !tensor.device().is_cpu() {
        return Ok(CopyLater::done(own(&tensor, len)?));
    }
    Ok(CopyLater::new(&len.into(), tensor.dtype(), move || own(&tensor, len)))
}

/// The piece that an optimizer's key is of.
fn piece_of<'a>(pieces: &'a [Piece], key: &str) -> Result<&'a Piece> {
    let is_of = |name: &str| key.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
    let of = pieces.iter().filter(|piece| is_of(&piece.var_name));
    of.max_by_key(|piece| piece.var_name.len()).ok_or_else(|| {
        let help = "make the optimizer from Parallel::named_vars, so that it is known whose part this is";
        Error::invalid("the optimizer's state", key, help)
    })
}

/// What is remembered, as a checkpoint has it: as many elements as the part has, without padding, or one number.
fn cut(value: CopyLater, elements: Option<usize>) -> CopyLater {
    let (count, dtype) = (value.dims().iter().product::<usize>(), value.dtype());
    match elements {
        Some(len) => CopyLater::new(&len.into(), dtype, move || {
            let value = value.copy()?;
            // It is a copy already.
            if count == len { value.flatten_all() } else { own(&value, len) }
        }),
        None => CopyLater::new(&().into(), dtype, move || value.copy()?.flatten_all()?.reshape(())),
    }
}
