//! Interfaces that differ between kinds of training: the step, the source of batches, and how checkpoints store the
//! model.

use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, Stats};
use report::metrics::MemoryUse;
use serde_json::Value;
use training::{Checkpoint, Checkpoints, Contents};

use crate::error::{Error, Result};
use crate::rank::Measured;

use super::Position;

/// A model on all ranks with its optimizer. A [`Trainer`](super::Trainer) does the rest.
pub trait Strategy {
    /// The input of a step.
    type Batch;

    /// Returns the name of a run on this many ranks, for the report.
    fn name(&self, world_size: usize) -> String {
        let _ = world_size;
        String::new()
    }

    /// Takes one step: forward, backward with all communication, and the optimizer's step. Returns the loss of this
    /// rank's batch, or `None` on a rank that does not know it.
    ///
    /// # Errors
    /// Errors of the model; a rank that failed.
    fn step(&mut self, at: Position, batch: &Self::Batch) -> Result<Option<Tensor>>;

    /// Returns the bytes of model state that this rank holds; bytes sent come from [`stats`](Self::stats).
    ///
    /// # Errors
    /// An optimizer whose state cannot be read.
    fn held(&self) -> Result<MemoryUse> {
        Ok(MemoryUse::default())
    }

    /// Returns the communication statistics of this rank so far.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// Returns the groups in which collectives run, other than the group of all ranks.
    fn groups(&self) -> Vec<Arc<dyn Communicator>> {
        Vec::new()
    }

    /// Adjusts the measured times if the time in [`groups`](Self::groups) is not the communication time; `begun` are
    /// the [`stats`](Self::stats) at the start of the measurement.
    fn measured(&self, measured: Measured, begun: &Stats) -> Measured {
        let _ = begun;
        measured
    }

    /// Writes a checkpoint with the model and its optimizer. Every rank must call it; if each holds the
    /// [`whole`](Self::whole) model, one rank alone.
    ///
    /// # Errors
    /// Files that cannot be written; a rank that failed; a strategy without checkpoints, as by default.
    fn save(&self, to: &Checkpoints, checkpoint: Checkpoint) -> Result<()> {
        let _ = (to, checkpoint);
        Err(no_checkpoints())
    }

    /// Reads the model and its optimizer from a checkpoint. Every rank must call it; if each holds the
    /// [`whole`](Self::whole) model, one rank alone.
    ///
    /// # Errors
    /// A checkpoint that is damaged, or of another model; a rank that failed; a strategy without checkpoints, as by default.
    fn load(&mut self, from: &Contents) -> Result<()> {
        let _ = from;
        Err(no_checkpoints())
    }

    /// Returns the model if each rank holds all of it, so that ranks can be lost and admitted.
    fn whole(&mut self) -> Option<&mut dyn Whole> {
        None
    }
}

fn no_checkpoints() -> Error {
    Error::Unavailable {
        wanted: "--checkpoint-dir".into(),
        help: "this training keeps no checkpoints".into(),
    }
}

/// A model that each rank holds completely.
pub trait Whole {
    /// Gives this rank, if it `receives`, the model and optimizer of rank `root`. Every rank must call it.
    ///
    /// # Errors
    /// An optimizer whose state cannot be read; a rank that failed.
    fn share(&mut self, comm: &dyn Communicator, root: usize, receives: bool) -> Result<()>;

    /// Continues in another group.
    ///
    /// # Errors
    /// A rank that failed.
    fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()>;

    /// Checks that all ranks have the same parameters. Every rank must call it.
    ///
    /// # Errors
    /// They differ; a rank that failed.
    fn check(&self) -> Result<()>;

    /// Returns the position and loss of the last step that was begun; the step may have failed after the loss was
    /// computed.
    fn latest(&self) -> Option<&(Position, Tensor)>;
}

/// The batches of an epoch.
pub type Batches<B> = Box<dyn Iterator<Item = Result<B>>>;

/// The source of a rank's batches.
pub trait Source {
    /// A batch.
    type Batch;

    /// Returns the number of remaining batches of the epoch.
    fn remaining(&self, at: Position) -> usize;

    /// Returns the number of samples in this rank's next batch, for printing; 0 if unknown.
    fn batch_size(&self) -> usize {
        0
    }

    /// Returns the remaining batches of the epoch.
    ///
    /// # Errors
    /// An order that cannot be computed.
    fn batches(&mut self, at: Position) -> Result<Batches<Self::Batch>>;

    /// Returns the position in the data, for [`resume`](Self::resume).
    ///
    /// # Errors
    /// A state that cannot be serialized.
    fn state(&self, at: Position) -> Result<Value> {
        let _ = at;
        Ok(Value::Null)
    }

    /// Resumes from a position that [`state`](Self::state) returned.
    ///
    /// # Errors
    /// A state of other data.
    fn resume(&mut self, state: &Value, at: Position) -> Result<()> {
        let _ = (state, at);
        Ok(())
    }

    /// Redistributes the rest of the epoch over another group.
    ///
    /// # Errors
    /// Data that cannot be redistributed.
    fn regroup(&mut self, comm: &dyn Communicator, at: Position) -> Result<()> {
        let _ = (comm, at);
        Ok(())
    }

    /// Returns what to add to the note about a resume if the number of data-parallel ranks has changed from `then`.
    fn changed(&self, then: usize) -> String {
        let _ = then;
        String::new()
    }
}
