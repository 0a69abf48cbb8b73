//! Loads checkpoints into a model on any number of ranks.

use std::collections::{BTreeMap, HashSet};

use candle_core::Device;
use comm::Communicator;
use serde_json::Value;
use training::{Checkpoint, Contents, LossScalerState, OptimizerState, load_tensors};

use super::{CheckpointReader, RANK_FILE};
use crate::agreement::{gather, rank_and_count};
use crate::{DistributedModel, Error, Piece, Result, all_agree, with_keep_alive};

/// Names of the sets of tensors that [`read_whole`] returns.
pub const MODEL: &str = "model";
/// See [`MODEL`]; it is missing if the checkpoint was written without an optimizer.
pub const OPTIMIZER: &str = "optimizer";

/// Loads a checkpoint that any strategy wrote, on the ranks of these groups: see [`DistributedModel::load_checkpoint`]. Returns
/// the writer's [`training::Checkpoint::extra`], and the state of the loss scaler.
pub(crate) fn load<M: DistributedModel + ?Sized>(
    model: &M,
    groups: &[&dyn Communicator],
    contents: &Contents,
    optimizer: Option<&mut dyn OptimizerState>,
) -> std::result::Result<(Value, Option<LossScalerState>), M::Error> {
    model.check()?;
    check_same(groups, contents)?;
    // Hashes are checked before damaged files can be read and misunderstood.
    let (rank, ranks) = rank_and_count(groups);
    with_keep_alive(groups, || Ok::<_, Error>(contents.check_share(rank, ranks)?))?;
    let pieces = all_agree(groups.iter().copied(), model.pieces())?;
    let opened = CheckpointReader::open(contents).and_then(|saved| {
        saved.check(&pieces)?;
        Ok(saved)
    });
    let mut saved = all_agree::<_, Error>(groups.iter().copied(), opened)?;
    check_names(groups, &saved, &pieces)?;
    if let Some(optimizer) = optimizer {
        let state = saved.optimizer_state(&pieces);
        let set = state.and_then(|state| Ok(optimizer.load_state(&state)?));
        all_agree::<_, Error>(groups.iter().copied(), set)?;
    }
    let set = model.replace(|| Ok(set(&mut saved, &pieces)?));
    all_agree(groups.iter().copied(), set)?;
    let loss_scale = saved.loss_scale();
    Ok((saved.into_extra(), loss_scale))
}

/// Sets parameters, and those buffers that are saved.
pub(super) fn set(saved: &mut CheckpointReader, pieces: &[Piece]) -> Result<()> {
    for piece in pieces {
        if !piece.is_buffer || saved.has(&piece.name) {
            let values = piece.padded(saved.read(&piece.name, &piece.region)?)?;
            piece.var.set(&values.to_dtype(piece.var.dtype())?.to_device(piece.var.device())?)?;
        }
    }
    Ok(())
}

/// Refuses different checkpoints on different ranks.
fn check_same(groups: &[&dyn Communicator], contents: &Contents) -> Result<()> {
    let files: Vec<(&String, &str)> =
        contents.files.iter().map(|(name, hash)| (name, &*hash.sha256)).collect();
    let own = format!("step {}: {files:?}", contents.step);
    match gather(groups, own.clone())?.iter().position(|other| *other != own) {
        Some(other) => {
            let problem = format!("rank {other} is given another checkpoint: all ranks must see one folder");
            Err(Error::file(&contents.folder, problem))
        }
        None => Ok(()),
    }
}

/// Refuses a checkpoint with parameters that no rank has.
fn check_names(groups: &[&dyn Communicator], saved: &CheckpointReader, pieces: &[Piece]) -> Result<()> {
    let own: Vec<String> = pieces.iter().map(|piece| piece.name.clone()).collect();
    let all: HashSet<String> = gather(groups, own)?.into_iter().flatten().collect();
    match saved.shapes().find(|(name, _)| !all.contains(*name)) {
        Some((name, _)) => {
            let problem =
                format!("it has a parameter {name} that is not trained here: it is of another model");
            Err(Error::file(saved.folder(), problem))
        }
        None => Ok(()),
    }
}

/// Reads a whole checkpoint into memory, in one process: the sets `model` and `optimizer`, and those that were added to it.
///
/// # Memory
/// The whole model and the optimizer's state.
///
/// # Errors
/// A checkpoint of another format; a file that has changed since it was written, by name.
pub fn read_whole(contents: &Contents) -> Result<Checkpoint> {
    contents.check_all()?;
    let mut saved = CheckpointReader::open(contents)?;
    let mut tensors = BTreeMap::new();
    for name in contents.files.keys().filter(|name| !name.starts_with(RANK_FILE)) {
        tensors.insert(name.clone(), load_tensors(&contents.path(name), &Device::Cpu)?);
    }
    let names: Vec<String> = saved.shapes().map(|(name, _)| name.to_string()).collect();
    let model = names.iter().map(|name| Ok((name.clone(), saved.whole(name)?)));
    tensors.insert(MODEL.into(), model.collect::<Result<_>>()?);
    if let Some(state) = saved.whole_optimizer()? {
        tensors.insert(OPTIMIZER.into(), state);
    }
    let Contents { epoch, step, sampler, .. } = contents.clone();
    Ok(Checkpoint { epoch, step, sampler, extra: saved.into_extra(), tensors })
}

/// Returns the writer's [`Checkpoint::extra`], without reading the files.
pub fn extra(contents: &Contents) -> Option<&Value> {
    contents.extra.get("extra")
}
