//! What the strategies of distributed training share.
//!
//! A strategy describes which elements of which parameters each rank holds ([`DistributedModel`], [`Piece`], [`Region`]).
//! From that follow, once for all strategies: the norm of gradients and clipping, agreement of ranks on errors, files of the
//! whole model, and checkpoints ([`checkpoint`]) that any layout, on any number of ranks, reads from any other.
#![forbid(unsafe_code)]

mod agreement;
mod average;
pub mod checkpoint;
mod error;
mod keep_alive;
mod model_copy;
mod norm;
mod parameter_difference;
mod parameter_groups;
mod piece;
mod region;
mod replicas;
mod traffic;
mod whole;
mod whole_matrices;

use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::Communicator;
use serde_json::Value;
use training::{Checkpoint, Checkpoints, Contents, LossScalerState, OptimizerState};

use agreement::rank_and_count;
use checkpoint::{DeferredSnapshot, RANK_FILE, Snapshot, load};

pub use agreement::{all_agree, all_agree_with, first_of};
pub use average::{BucketAverage, average_gradients};
pub use error::{Error, Result};
pub use keep_alive::{while_others_work, with_keep_alive};
pub use model_copy::ModelCopy;
pub use parameter_difference::ParameterDifference;
pub use parameter_groups::ParameterGroups;
pub use piece::Piece;
pub use region::Region;
pub use replicas::{Replicas, check_replicas};
pub use traffic::traffic;
pub use whole_matrices::OwnedMatrices;

/// A model on several ranks, each of which holds some elements of its parameters.
///
/// Implemented by each strategy, which describes itself by the required methods; the provided ones are the same for all.
pub trait DistributedModel {
    /// The strategy's error.
    type Error: From<Error> + From<comm::Error> + From<training::Error> + Display;

    /// Name of the method that returns the variables for an optimizer, for messages.
    const NAMED_VARS: &'static str;

    /// Returns the first cause, if an earlier call failed and the ranks are out of step.
    ///
    /// # Errors
    /// As above.
    fn check(&self) -> Result<(), Self::Error>;

    /// Returns the groups that together are all ranks of the model, as in [`all_agree`]: one, or those along the axes
    /// of a mesh.
    fn groups(&self) -> Vec<&dyn Communicator>;

    /// Returns the groups along which ranks hold different elements.
    fn partition_groups(&self) -> Vec<&dyn Communicator>;

    /// Returns to which copy of the model this rank belongs: copies hold the same elements, and share the writing of a checkpoint.
    fn copy(&self) -> ModelCopy;

    /// Returns this rank's pieces of trained parameters, in the order of the variables, and then of buffers.
    ///
    /// # Errors
    /// A description that is not complete.
    fn pieces(&self) -> Result<Vec<Piece>, Self::Error>;

    /// Returns, for each parameter that is tied to an earlier one, the name of the first one.
    fn ties(&self) -> HashMap<String, String> {
        HashMap::new()
    }

    /// Returns the state of the loss scaler that checkpoints contain.
    fn loss_scale(&self) -> Option<LossScalerState> {
        None
    }

    /// Sets the state of the loss scaler from a checkpoint.
    fn set_loss_scale(&mut self, _: Option<LossScalerState>) {}

    /// Changes the parameters by `change`, outside of a step.
    ///
    /// # Errors
    /// Those of `change`.
    fn replace<T>(&self, change: impl FnOnce() -> Result<T, Self::Error>) -> Result<T, Self::Error> {
        change()
    }

    /// Returns the variables whose gradients this rank contributes to the norm.
    ///
    /// # Errors
    /// Those of [`pieces`](Self::pieces).
    fn counted_vars(&self) -> Result<Vec<Var>, Self::Error> {
        let counted = self.pieces()?.into_iter().filter(|piece| piece.is_first && !piece.is_buffer);
        Ok(counted.map(|piece| piece.var).collect())
    }

    /// Returns the 2-norm of the gradients of all parameters over all ranks, each counted once: bitwise the same on every
    /// rank. Call on every rank.
    ///
    /// # Cost
    /// One pass over this rank's gradients; an all-gather of 8 bytes per rank along each axis on which ranks have different
    /// parameters.
    ///
    /// # Errors
    /// The first cause, if an earlier call failed; errors of candle; failures of communication.
    fn grad_norm(&self, grads: &GradStore) -> Result<f64, Self::Error> {
        self.check()?;
        let own = training::grad_norm(grads, &self.counted_vars()?)?;
        Ok(norm::global_norm(self.partition_groups(), own)?)
    }

    /// Scales all gradients so that their norm over all ranks is at most `max_norm`, and returns the norm before scaling.
    /// Call on every rank.
    ///
    /// Like PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True` in a single process that has all parameters: all
    /// gradients are multiplied by `max_norm / (norm + 1e-6)` if that is below 1.
    ///
    /// # Cost
    /// That of [`grad_norm`](Self::grad_norm), and another pass if they are scaled.
    ///
    /// # Errors
    /// On every rank: [`Error::NotFinite`] if a gradient contains a NaN or an infinity on any rank;
    /// [`training::Error::InvalidConfig`] for a `max_norm` that is negative or NaN. The gradients are then unchanged.
    fn clip_grad_norm(&self, grads: &mut GradStore, max_norm: f64) -> Result<f64, Self::Error> {
        norm::clip_grad_norm(self, grads, max_norm)
    }

    /// Returns the first rank that has a gradient which is not finite, and the first such parameter there: the same on every
    /// rank. `None` if there is none, as when only the sum of all squares overflows. Call on every rank.
    ///
    /// # Errors
    /// Errors of candle; failures of communication.
    fn first_not_finite(&self, grads: &GradStore) -> Result<Option<(usize, String)>, Self::Error> {
        norm::first_not_finite(self, grads)
    }

    /// Copies this rank's contribution to a checkpoint, for [`Snapshot::write`] while training continues.
    ///
    /// # Errors
    /// An optimizer that was not made from the model's named variables.
    fn snapshot(&self, optimizer: Option<&dyn OptimizerState>) -> Result<Snapshot, Self::Error> {
        Ok(self.snapshot_later(optimizer)?.copy()?)
    }

    /// Prepares a copy that can be made while forward and backward of the next step run: parameters only change in the
    /// optimizer's step, which must wait for [`DeferredSnapshot::copy`]. Variables that forward changes, such as running
    /// statistics, are copied at once, and so are variables that are not on the CPU.
    ///
    /// # Errors
    /// Those of [`snapshot`](Self::snapshot).
    fn snapshot_later(
        &self,
        optimizer: Option<&dyn OptimizerState>,
    ) -> Result<DeferredSnapshot, Self::Error> {
        let (rank, _) = rank_and_count(&self.groups());
        DeferredSnapshot::of(self, format!("{RANK_FILE}{rank:05}"), self.copy(), optimizer)
    }

    /// Writes a checkpoint on this rank alone, which must hold the whole model.
    ///
    /// # Errors
    /// Those of [`save_checkpoint`](Self::save_checkpoint).
    fn save_alone(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf, Self::Error> {
        let file = format!("{RANK_FILE}{:05}", 0);
        let snapshot = DeferredSnapshot::of(self, file, ModelCopy::ONLY, optimizer)?.copy()?;
        Ok(snapshot.write(&[], checkpoints, checkpoint)?)
    }

    /// Writes a checkpoint: each rank writes its pieces of the parameters and of the optimizer's state; the manifest lists
    /// them. Call on every rank, with the same folder, which all ranks must see. The first rank's `checkpoint` holds
    /// everything else that is stored; additional tensor sets may be in that of any rank.
    ///
    /// A crash at any moment leaves either the last checkpoint intact or the new one complete.
    ///
    /// # Memory
    /// A copy of this rank's pieces and of the optimizer's state.
    ///
    /// # Errors
    /// On every rank, with the latest checkpoint unchanged: a file that cannot be written; an optimizer that was not
    /// made from the model's named variables; failures of communication.
    fn save_checkpoint(
        &self,
        checkpoints: &Checkpoints,
        optimizer: Option<&dyn OptimizerState>,
        checkpoint: &Checkpoint,
    ) -> Result<PathBuf, Self::Error> {
        self.check()?;
        let groups = self.groups();
        let snapshot = all_agree(groups.iter().copied(), self.snapshot(optimizer))?;
        Ok(snapshot.write(&groups, checkpoints, checkpoint)?)
    }

    /// Reads a checkpoint that any strategy wrote, on any number of ranks: the parameters, those buffers that it has, and
    /// the optimizer's state if an optimizer is given. Call on every rank, with the same checkpoint, between two steps.
    /// Returns the writer's [`training::Checkpoint::extra`].
    ///
    /// # Cost
    /// Each rank reads its pieces; all ranks together read all files once more to check the hashes.
    ///
    /// # Errors
    /// On every rank: a checkpoint of another model; one without an optimizer's state, where an optimizer is given; a file
    /// that has changed since it was written, by name.
    fn load_checkpoint(
        &mut self,
        contents: &Contents,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Value, Self::Error> {
        let (extra, loss_scale) = load(self, &self.groups(), contents, optimizer)?;
        self.set_loss_scale(loss_scale);
        Ok(extra)
    }

    /// Reads a checkpoint on this rank alone, which must hold the whole model: see [`load_checkpoint`](Self::load_checkpoint).
    ///
    /// # Errors
    /// Those of [`load_checkpoint`](Self::load_checkpoint).
    fn load_alone(
        &mut self,
        contents: &Contents,
        optimizer: Option<&mut dyn OptimizerState>,
    ) -> Result<Value, Self::Error> {
        let (extra, loss_scale) = load(self, &[], contents, optimizer)?;
        self.set_loss_scale(loss_scale);
        Ok(extra)
    }

    /// Passes each whole parameter and buffer with its name to `visit` on the first rank: for writing file formats other than
    /// that of [`save_full`](Self::save_full). Of tied variables on different ranks all are passed. Call on every rank.
    ///
    /// # Memory
    /// On the first rank, one parameter at a time.
    ///
    /// # Errors
    /// On every rank, the error of `visit`; the first cause, if an earlier call failed; failures of communication.
    fn visit_full(
        &self,
        visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>,
    ) -> Result<(), Self::Error> {
        whole::visit(self, visit)
    }

    /// Writes the whole model to one safetensors file under its names, which PyTorch can read if the model uses its names.
    /// Call on every rank; the first one writes. The file appears complete or not at all: see [`training::internal::AtomicFile`].
    ///
    /// # Memory
    /// On the first rank, one parameter at a time.
    ///
    /// # Errors
    /// On every rank, if the file cannot be written; otherwise as [`visit_full`](Self::visit_full).
    fn save_full(&self, path: impl AsRef<Path>) -> Result<(), Self::Error> {
        whole::save(self, path.as_ref())
    }

    /// Reads this rank's elements from a safetensors file of the whole model, such as one of [`save_full`](Self::save_full) or
    /// of PyTorch; buffers may be missing there. Call on every rank, between two steps; every
    /// rank must be able to read the file. Nothing is changed on any rank unless the file matches the model.
    ///
    /// # Cost
    /// Each rank reads only what it holds.
    ///
    /// # Errors
    /// On every rank: a file that cannot be read or does not match; the first cause, if an earlier call failed; failures of
    /// communication.
    fn load_full(&self, path: impl AsRef<Path>) -> Result<(), Self::Error> {
        self.check()?;
        whole::load(self, path.as_ref())
    }
}
