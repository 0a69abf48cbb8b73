//! Checkpoints: model and optimizer, written by rank 0 and read by all.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use comm::complete_together;
use training::{Checkpoint, Checkpoints, Contents, FileError, OptimizerState, load_tensors};

use crate::save::peer_failed;
use crate::{Ddp, Error, Result};

/// Names of the sets of tensors.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";

impl<M> Ddp<M> {
    /// Writes a checkpoint: the parameters, buffers and integers as the set `model`, and the optimizer's state as the set
    /// `optimizer`. Must be called on every rank; rank 0 writes. `checkpoint` contains everything else that is to be saved;
    /// that of rank 0 is used.
    ///
    /// A crash at any moment leaves either the previous checkpoint or the complete new one: see [`Checkpoints`].
    ///
    /// # Memory
    /// On rank 0 a copy of the optimizer's state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint unchanged, if rank 0 cannot write. The first cause, if an earlier call failed;
    /// failures of communication.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap, linear};
    /// use comm::Local;
    /// use ddp::{Ddp, DdpConfig, Error};
    /// use training::{Adam, AdamConfig, Checkpoint, CheckpointConfig, Checkpoints};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let config = CheckpointConfig { dir: folder.path().join("run"), ..CheckpointConfig::default() };
    /// let checkpoints = Checkpoints::open(config)?;
    /// let steps = Local::run_shared(2, |comm| {
    ///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    ///     let ddp = Ddp::new(comm, vb, &DdpConfig::default(), |vb| linear(3, 2, vb))?;
    ///     let mut adam = Adam::named(ddp.named_vars(), AdamConfig::default()).map_err(Error::from)?;
    ///     ddp.save_checkpoint(&checkpoints, Some(&adam), &Checkpoint { step: 600, ..Checkpoint::default() })?;
    ///     // Another day, on any number of ranks:
    ///     let Some(latest) = checkpoints.latest().map_err(Error::from)? else { return Ok(0) };
    ///     ddp.load_checkpoint(&latest, Some(&mut adam))?;
    ///     Ok(latest.step)
    /// })?;
    /// assert_eq!(steps, [600, 600]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn save_checkpoint(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf> {
        let number = complete_together(
            &[self.comm()?],
            || Ok(checkpoints.begin()?.number()),
            |_| Ok(()),
            |number, _| {
                let tensors = self.tensors(optimizer, checkpoint)?;
                checkpoints
                    .draft(*number)
                    .commit(&Checkpoint { tensors, ..checkpoint.clone() }, BTreeMap::new())?;
                Ok(())
            },
            peer_failed,
        )?;
        Ok(checkpoints.draft(number).folder())
    }

    fn tensors(
        &self,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<BTreeMap<String, HashMap<String, Tensor>>> {
        let mut tensors = checkpoint.tensors.clone();
        let model = self.state().into_iter().map(|(name, var)| (name, var.as_detached_tensor()));
        tensors.insert(MODEL.into(), model.collect());
        // Also if it has no state yet, which differs from no optimizer.
        if let Some(optimizer) = optimizer {
            tensors.insert(OPTIMIZER.into(), optimizer.state()?.into_iter().collect());
        }
        Ok(tensors)
    }

    /// Reads a checkpoint that [`Ddp::save_checkpoint`] has written, at this or any other number of ranks: the model, and the
    /// optimizer's state if an optimizer is given. Must be called on every rank, with the same checkpoint, which every rank must
    /// be able to read. Returns what was saved as [`Checkpoint::extra`]. Gradients of
    /// [`backward_no_sync`](Self::backward_no_sync) belong to the old parameters: call this between two steps.
    ///
    /// # Memory
    /// A copy of the model and of the optimizer's state.
    ///
    /// # Errors
    /// [`training::Error::DamagedCheckpoint`]; a checkpoint of another model, or without an optimizer's state where an optimizer
    /// is given. The model is then unchanged on every rank, and the other ranks return [`Error::PeerFile`]. The first cause, if
    /// an earlier call failed; failures of communication.
    pub fn load_checkpoint(
        &self,
        contents: &Contents,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<serde_json::Value> {
        let comm = self.comm()?;
        // Hashes are checked first, so that no rank interprets damaged data.
        let whole = contents.check_share(comm.rank(), comm.world_size());
        self.all_agree(whole.map_err(Error::from))?;
        let path = self.all_agree(of_set(contents, MODEL))?;
        let values = self.all_agree(self.read(&path).map_err(Error::from))?;
        let loaded = optimizer.map_or(Ok(()), |optimizer| {
            let state = load_tensors(&of_set(contents, OPTIMIZER)?, &Device::Cpu)?;
            optimizer.load_state(&state).map_err(Error::from)
        });
        self.all_agree(loaded)?;
        self.set(&path, values)?;
        Ok(contents.extra.clone())
    }
}

/// Returns the file of a set of tensors.
fn of_set(contents: &Contents, name: &str) -> Result<PathBuf> {
    let path = contents.path(name);
    if contents.files.contains_key(name) {
        return Ok(path);
    }
    let reason = match name {
        OPTIMIZER => "the checkpoint was written without an optimizer; load it without one",
        _ => "the checkpoint was not written by `Ddp::save_checkpoint`",
    };
    Err(FileError::read(&path, reason).into())
}
