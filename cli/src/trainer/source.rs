//! Sources of training batches: data loaders in the order of a sampler.

use comm::Communicator;
use sampler::{
    DataLoader, Dataset, DistributedSampler, DistributedSamplerConfig, RandomSampler, Sampler, SamplerState,
};
use serde_json::Value;

use crate::error::{Error, Result};

use super::{Batches, Position, Source};

/// Loader of this rank's share of a data set.
pub type Loader<D, B> = DataLoader<D, B, DistributedSampler>;

/// Epochs over this rank's share of a data set.
pub struct Epochs<D: Dataset, B> {
    loader: Loader<D, B>,
    reshuffle: bool,
    ranks: &'static str,
    /// The batch of the epoch with which the loader began, or where it is to go on.
    begun: usize,
}

impl<D: Dataset + 'static, B: Send + 'static> Epochs<D, B> {
    /// Creates epochs that each have their own order.
    pub fn new(loader: Loader<D, B>) -> Self {
        Self { loader, reshuffle: true, ranks: "world size {}", begun: 0 }
    }

    /// Sets whether each epoch has its own order (`set_epoch`). If not, all epochs have the order of the first.
    #[must_use]
    pub fn reshuffling(self, reshuffle: bool) -> Self {
        Self { reshuffle, ..self }
    }

    /// Sets what [`Source::changed`] calls the ranks; `{}` stands for their number.
    #[must_use]
    pub fn over(self, ranks: &'static str) -> Self {
        Self { ranks, ..self }
    }

    fn sampler_position(&self, at: Position) -> SamplerState {
        // All batches but an epoch's last have this size, and after that one no sample is left.
        let taken = at.batch.saturating_sub(self.begun) * self.loader.config().batch_size;
        let state = self.loader.sampler().state(taken);
        match at.batch {
            0 => {
                let epoch = if self.reshuffle { at.epoch as u64 } else { 0 };
                SamplerState { epoch, consumed: 0, ..state }
            }
            _ => state,
        }
    }
}

impl<D: Dataset + 'static, B: Send + 'static> Source for Epochs<D, B> {
    type Batch = B;

    fn remaining(&self, _: Position) -> usize {
        self.loader.len()
    }

    fn batch_size(&self) -> usize {
        self.loader.config().batch_size.min(self.loader.sampler().len())
    }

    /// Moves the sampler to the start of the epoch, unless it is in the middle of one.
    fn batches(&mut self, at: Position) -> Result<Batches<B>> {
        self.begun = at.batch;
        if at.batch == 0 {
            let state = self.sampler_position(at);
            self.loader.sampler_mut().resume(&state)?;
        }
        batches_of(&mut self.loader)
    }

    fn state(&self, at: Position) -> Result<Value> {
        let state = serde_json::to_value(self.sampler_position(at));
        state
            .map_err(|reason| Error::Checkpoint { problem: format!("its state cannot be written: {reason}") })
    }

    fn resume(&mut self, state: &Value, at: Position) -> Result<()> {
        self.begun = at.batch;
        Ok(self.loader.sampler_mut().resume(&sampler_state(state)?)?)
    }

    fn regroup(&mut self, comm: &dyn Communicator, at: Position) -> Result<()> {
        let state = self.sampler_position(at);
        let (num_replicas, rank) = (comm.world_size(), comm.rank());
        let config = self.loader.sampler().config().clone();
        let mut sampler = DistributedSampler::new(DistributedSamplerConfig { num_replicas, rank, ..config })?;
        sampler.resume(&state)?;
        *self.loader.sampler_mut() = sampler;
        self.begun = at.batch;
        Ok(())
    }

    fn changed(&self, then: usize) -> String {
        let ranks = self.ranks.replace("{}", &then.to_string());
        format!(
            "; it was made with {ranks}, so what is left of the data is distributed again, and the numbers are those of neither"
        )
    }
}

/// Deserializes the position of a checkpoint in the data.
///
/// # Errors
/// Another text.
pub fn sampler_state(state: &Value) -> Result<SamplerState> {
    serde_json::from_value(state.clone()).map_err(|reason| Error::Checkpoint {
        problem: format!("its sampler's state cannot be read: {reason}"),
    })
}

/// A whole data set in random order, for a single process.
impl<D: Dataset + 'static, B: Send + 'static> Source for DataLoader<D, B, RandomSampler> {
    type Batch = B;

    fn remaining(&self, _: Position) -> usize {
        self.len()
    }

    fn batches(&mut self, _: Position) -> Result<Batches<B>> {
        batches_of(self)
    }
}

fn batches_of<D, B, S>(loader: &mut DataLoader<D, B, S>) -> Result<Batches<B>>
where
    D: Dataset + 'static,
    B: Send + 'static,
    S: Sampler,
{
    Ok(Box::new(loader.batches()?.map(|batch| batch.map_err(Error::from))))
}
