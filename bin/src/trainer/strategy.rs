//! What differs from one way of training to another: a step, where its batches come from, and how a checkpoint keeps the model.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, Stats};
use report::metrics::Held;
use serde_json::Value;
use training::{Checkpoint, Checkpoints, Contents};

use crate::error::Result;
use crate::rank::Measured;

use super::Position;

/// A model on all ranks, with what trains it. A [`Trainer`](super::Trainer) does the rest.
pub trait Strategy {
    /// What a step learns from.
    type Batch;

    /// What a report calls a run on so many ranks.
    fn name(&self, world_size: usize) -> String {
        let _ = world_size;
        String::new()
    }

    /// One step: forward, backward with all that ranks exchange, and the optimizer's step. Gives the loss of this rank's batch, on
    /// a rank that knows it.
    ///
    /// # Errors
    /// What the model fails with; a rank that failed.
    fn step(&mut self, at: Position, batch: &Self::Batch) -> Result<Option<Tensor>>;

    /// What this rank holds; the bytes that it sends come from [`stats`](Self::stats).
    ///
    /// # Errors
    /// An optimizer whose state cannot be read.
    fn held(&self) -> Result<Held> {
        Ok(Held::default())
    }

    /// What this rank has sent so far.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// Groups in which collectives run, beside that of all ranks.
    fn groups(&self) -> Vec<Arc<dyn Communicator>> {
        Vec::new()
    }

    /// What was measured since [`stats`](Self::stats) were these, where the time in [`groups`](Self::groups) is not what counts.
    fn measured(&self, measured: Measured, begun: &Stats) -> Measured {
        let _ = begun;
        measured
    }

    /// How a checkpoint keeps it.
    fn kept(&mut self) -> Kept<'_> {
        Kept::Not
    }
}

/// How a checkpoint keeps a model.
pub enum Kept<'a> {
    /// Not at all.
    Not,
    /// As a whole: each rank has all of it, the first one writes it, and all get what that one reads.
    Whole(&'a mut dyn Whole),
    /// In parts: each rank writes and reads its own, in a folder that all see.
    Parts(&'a mut dyn Parts),
}

/// Tensors by set and name.
pub type Sets = BTreeMap<String, HashMap<String, Tensor>>;

/// A model that each rank has all of, so that ranks can come and go.
pub trait Whole {
    /// All that a checkpoint keeps: not copies.
    ///
    /// # Errors
    /// An optimizer whose state cannot be read.
    fn tensors(&self) -> Result<Sets>;

    /// Takes them back.
    ///
    /// # Errors
    /// Those of another model, with nothing changed; of another optimizer.
    fn set(&mut self, sets: &Sets) -> Result<()>;

    /// Goes on in another group.
    ///
    /// # Errors
    /// A rank that failed.
    fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()>;

    /// Makes sure that all ranks have the same. To be called on every rank.
    ///
    /// # Errors
    /// They have not; a rank that failed.
    fn check(&self) -> Result<()>;

    /// The loss of the last step that was begun, and where that was: it may have failed in the middle.
    fn latest(&self) -> Option<&(Position, Tensor)>;
}

/// A model of which each rank has a part.
pub trait Parts {
    /// Writes a checkpoint, with whatever else it keeps. To be called on every rank.
    ///
    /// # Errors
    /// Files that cannot be written; a rank that failed.
    fn save(&self, to: &Checkpoints, checkpoint: Checkpoint) -> Result<()>;

    /// Reads one. To be called on every rank.
    ///
    /// # Errors
    /// A checkpoint that is damaged, or of another model; a rank that failed.
    fn load(&mut self, from: &Contents) -> Result<()>;
}

/// Batches of an epoch, with the samples of this rank in them and those before.
pub type Batches<B> = Box<dyn Iterator<Item = Result<(B, usize)>>>;

/// Where a rank's batches come from.
pub trait Source {
    /// One of them.
    type Batch;

    /// Batches that are left of the epoch.
    fn remaining(&self, at: Position) -> usize;

    /// Samples in the next batch of this rank, for those who tell of it.
    fn batch_size(&self) -> usize {
        0
    }

    /// The batches that are left of the epoch.
    ///
    /// # Errors
    /// An order that cannot be made.
    fn batches(&mut self, at: Position) -> Result<Batches<Self::Batch>>;

    /// Where the data stand, this rank having taken so many samples since the epoch began or was resumed.
    ///
    /// # Errors
    /// What cannot be written.
    fn state(&self, at: Position, taken: usize) -> Result<Value> {
        let _ = (at, taken);
        Ok(Value::Null)
    }

    /// Goes on from there.
    ///
    /// # Errors
    /// A state of other data.
    fn resume(&mut self, state: &Value, at: Position) -> Result<()> {
        let _ = (state, at);
        Ok(())
    }

    /// Deals out what is left of the epoch in another group.
    ///
    /// # Errors
    /// Data that cannot be dealt out.
    fn regroup(&mut self, comm: &dyn Communicator, at: Position, taken: usize) -> Result<()> {
        let _ = (comm, at, taken);
        Ok(())
    }

    /// What is to be said of a run that goes on with another number of ranks with data of their own than it had then.
    fn changed(&self, then: usize) -> String {
        let _ = then;
        String::new()
    }
}
