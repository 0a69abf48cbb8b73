//! Interfaces that differ between kinds of training: the step, the source of batches, and how checkpoints store the
//! model.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, Stats};
use report::metrics::MemoryUse;
use serde_json::Value;
use training::{Checkpoint, Checkpoints, Contents};

use crate::error::Result;
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

    /// Returns how checkpoints store the model.
    fn kept(&mut self) -> CheckpointForm<'_> {
        CheckpointForm::Not
    }
}

/// How checkpoints store a model.
pub enum CheckpointForm<'a> {
    /// Not at all.
    Not,
    /// As a whole: each rank has all of it, rank 0 writes it, and rank 0 reads it and broadcasts it.
    Whole(&'a mut dyn Whole),
    /// In parts: each rank writes and reads its own, in a folder that all ranks can access.
    Parts(&'a mut dyn Parts),
}

/// Tensors by set and name.
pub type Sets = BTreeMap<String, HashMap<String, Tensor>>;

/// A model that each rank holds completely, so that ranks can be lost and admitted.
pub trait Whole {
    /// Returns all tensors for a checkpoint, not copied.
    ///
    /// # Errors
    /// An optimizer whose state cannot be read.
    fn tensors(&self) -> Result<Sets>;

    /// Writes a checkpoint, on this rank alone; the tensors of [`tensors`](Self::tensors) in it are not used.
    ///
    /// # Errors
    /// Files that cannot be written.
    fn save(&self, to: &Checkpoints, checkpoint: Checkpoint) -> Result<()>;

    /// Restores the tensors.
    ///
    /// # Errors
    /// Tensors of another model, with nothing changed; or of another optimizer.
    fn set(&mut self, sets: &Sets) -> Result<()>;

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

/// A model divided over the ranks.
pub trait Parts {
    /// Writes a checkpoint. Every rank must call it.
    ///
    /// # Errors
    /// Files that cannot be written; a rank that failed.
    fn save(&self, to: &Checkpoints, checkpoint: Checkpoint) -> Result<()>;

    /// Reads a checkpoint. Every rank must call it.
    ///
    /// # Errors
    /// A checkpoint that is damaged, or of another model; a rank that failed.
    fn load(&mut self, from: &Contents) -> Result<()>;
}

/// The batches of an epoch, each with the number of samples that this rank has taken so far, including that batch.
pub type Batches<B> = Box<dyn Iterator<Item = Result<(B, usize)>>>;

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

    /// Returns the position in the data; `taken` is the number of samples that this rank has taken since the epoch
    /// began or was resumed.
    ///
    /// # Errors
    /// A state that cannot be serialized.
    fn state(&self, at: Position, taken: usize) -> Result<Value> {
        let _ = (at, taken);
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
    fn regroup(&mut self, comm: &dyn Communicator, at: Position, taken: usize) -> Result<()> {
        let _ = (comm, at, taken);
        Ok(())
    }

    /// Returns what to add to the note about a resume if the number of data-parallel ranks has changed from `then`.
    fn changed(&self, then: usize) -> String {
        let _ = then;
        String::new()
    }
}
