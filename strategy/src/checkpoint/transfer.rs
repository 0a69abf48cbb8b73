//! Moves the state of a model to another layout, from the memory of the ranks that hold it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;
use std::str::FromStr;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, all_gather_object};
use serde::{Deserialize, Serialize};
use training::{LossScalerState, OptimizerState};

use super::load::set;
use super::shard_index::{ShardIndex, model_key, optimizer_key};
use super::snapshot::SnapshotParts;
use super::{CheckpointReader, Snapshot};
use crate::{Error, Piece, Result};

/// A rank's pieces of a model, for the other ranks.
#[derive(Serialize, Deserialize)]
struct Offer {
    described: SnapshotParts,
    tensors: Vec<Outline>,
}

/// Key, dtype and shape of a tensor.
#[derive(Serialize, Deserialize)]
struct Outline {
    key: String,
    dtype: String,
    dims: Vec<usize>,
}

/// A range of elements of a tensor in the snapshot of this name.
#[derive(Serialize, Deserialize)]
struct Request {
    file: String,
    key: String,
    elements: Range<usize>,
}

/// The tensors that are offered, by snapshot and key, with the rank that offers them.
type Offered = HashMap<(String, String), (usize, Outline)>;

/// The pieces of a rank's model and its optimizer, which are given the state.
pub struct Receiver<'a> {
    /// The pieces.
    pub pieces: Vec<Piece>,
    /// The optimizer.
    pub optimizer: &'a mut dyn OptimizerState,
}

/// Gives a model on the ranks of `world` the state in their snapshots, which each rank has prepared by
/// [`DeferredSnapshot::of`](super::DeferredSnapshot::of) as one that writes. Of the ranks whose snapshots have the same
/// pieces and name, one `offers` its own to the others. A rank without a `receiver` only sends. Call on every rank of the
/// group. Returns the state of the loss scaler.
///
/// # Cost
/// Each rank receives the elements that it needs and does not hold, once.
///
/// # Errors
/// Pieces that are not the whole model; failures of communication.
pub fn transfer(
    world: &dyn Communicator,
    held: Option<&Snapshot>,
    offers: bool,
    receiver: Option<Receiver<'_>>,
) -> Result<Option<LossScalerState>> {
    let own = held.filter(|_| offers).map(Offer::of);
    let (index, offered) = collect(all_gather_object(world, &own)?);
    let mut reader = CheckpointReader::of(Path::new("the other ranks"), index, BTreeMap::new())?;
    let wanted = receiver.as_ref().map(|receiver| requests(&receiver.pieces, &reader, &offered));
    let mut remote = Vec::new();
    for request in wanted.unwrap_or_default() {
        match held.filter(|held| held.described.file == request.file) {
            Some(held) => {
                reader.insert(&request.file, &request.key, request.elements.start, held.read(&request)?)
            }
            None => remote.push(request),
        }
    }
    for (to, requests) in all_gather_object::<Vec<Request>>(world, &remote)?.iter().enumerate() {
        for request in requests {
            let Some((from, outline)) = offered.get(&(request.file.clone(), request.key.clone())) else {
                return Err(Error::invalid(
                    "a part of the model",
                    &request.key,
                    "no rank offers it: this is a mistake in girandole",
                ));
            };
            if to == world.rank() {
                let tensor = outline.room_for(&request.elements)?;
                world.run(Operation::Recv { tensor: tensor.clone(), from: *from })?;
                reader.insert(&request.file, &request.key, request.elements.start, tensor);
            } else if let Some(held) = held.filter(|_| *from == world.rank()) {
                world.run(Operation::Send { tensor: held.read(request)?, to })?;
            }
        }
    }
    if let Some(Receiver { pieces, optimizer }) = receiver {
        optimizer.load_state(&reader.optimizer_state(&pieces)?)?;
        set(&mut reader, &pieces)?;
    }
    Ok(reader.loss_scale())
}

/// Returns the description of all pieces, and the tensors with the ranks that offer them.
fn collect(offers: Vec<Option<Offer>>) -> (ShardIndex, Offered) {
    let (mut index, mut offered) = (ShardIndex::default(), Offered::new());
    for (from, offer) in offers.into_iter().enumerate() {
        let Some(Offer { described, tensors }) = offer else { continue };
        let SnapshotParts { file, parts, optimizer, ties, loss_scale } = described;
        index.add(parts, optimizer, ties);
        index.loss_scale = loss_scale;
        let of_file = |outline: Outline| ((file.clone(), outline.key.clone()), (from, outline));
        offered.extend(tensors.into_iter().map(of_file));
    }
    (index, offered)
}

/// Returns what this rank reads to set its model and optimizer.
fn requests(pieces: &[Piece], reader: &CheckpointReader, offered: &Offered) -> Vec<Request> {
    let mut all = Vec::new();
    for piece in pieces {
        let reads = reader.reads(&piece.name, &piece.region);
        let mut keys = vec![model_key(reader.root(&piece.name))];
        for (key, by_element) in reader.optimizer_keys(&piece.name) {
            let key = optimizer_key(key);
            if by_element {
                keys.push(key);
            } else if let Some(((file, _), _)) =
                offered.iter().filter(|((_, of), _)| *of == key).min_by_key(|(at, _)| *at)
            {
                all.push(Request { file: file.clone(), key, elements: 0..1 });
            }
        }
        for key in keys {
            let request = |(file, elements): &(String, Range<usize>)| Request {
                file: file.clone(),
                key: key.clone(),
                elements: elements.clone(),
            };
            all.extend(reads.iter().map(request));
        }
    }
    all
}

impl Offer {
    fn of(snapshot: &Snapshot) -> Self {
        let outline = |(key, tensor): (&String, &Tensor)| Outline {
            key: key.clone(),
            dtype: tensor.dtype().as_str().to_string(),
            dims: tensor.dims().to_vec(),
        };
        Self {
            described: snapshot.described.clone(),
            tensors: snapshot.tensors.iter().map(outline).collect(),
        }
    }
}

impl Outline {
    /// Returns a tensor to receive these elements in.
    fn room_for(&self, elements: &Range<usize>) -> Result<Tensor> {
        let dtype = DType::from_str(&self.dtype).map_err(candle_core::Error::msg)?;
        let dims = if self.dims.is_empty() { Vec::new() } else { vec![elements.len()] };
        Ok(Tensor::zeros(dims, dtype, &Device::Cpu)?)
    }
}

impl Snapshot {
    /// Returns elements of a tensor; of one with a single value the tensor.
    fn read(&self, Request { key, elements, .. }: &Request) -> Result<Tensor> {
        let Some(tensor) = self.tensors.get(key) else {
            return Err(Error::invalid(
                "a part of the model",
                key,
                "this rank does not hold it: this is a mistake in girandole",
            ));
        };
        if tensor.dims().is_empty() {
            return Ok(tensor.clone());
        }
        Ok(tensor.narrow(0, elements.start, elements.len())?.contiguous()?)
    }
}
