//! Training data: rows that are accessed by index.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use comm::Communicator;
use models::tokens::Rows;
use sampler::{OrderConfig, RunLoader, SamplerError, SamplerState};

use super::TrainConfig;
use crate::Error;

/// Training data: rows, accessed by index.
pub trait Data: Send + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Returns some rows as the model's input and targets. A [`Trainer`](super::Trainer) calls it on another thread, for batches
    /// in their order, up to three before the step that takes them, with the CPU as device; it moves them to the model's.
    ///
    /// # Errors
    /// Rows that cannot be read.
    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)>;

    /// Returns an identification of the data: a run resumes only with the data that its checkpoint was made with. By
    /// default the number of rows.
    fn fingerprint(&self) -> String {
        format!("{} rows", self.rows())
    }
}

impl Data for Rows {
    fn rows(&self) -> usize {
        self.len()
    }

    fn batch(&self, rows: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
        let (mut tokens, mut targets) = (Vec::new(), Vec::new());
        for row in rows {
            let row = self.get(*row).map_err(comm::carry)?;
            if !row.documents.is_empty() {
                candle_core::bail!(
                    "rows of several documents cannot be trained on yet: pack them as a stream"
                );
            }
            tokens.extend(row.tokens);
            targets.extend(row.targets);
        }
        let shape = (rows.len(), self.row_len());
        Ok((Tensor::from_vec(tokens, shape, device)?, Tensor::from_vec(targets, shape, device)?))
    }

    fn fingerprint(&self) -> String {
        Rows::fingerprint(self)
    }
}

/// This rank's batches of a run, in their order, read ahead of the steps.
pub(super) struct Batches {
    pub(super) data: Arc<dyn Data>,
    loader: RunLoader<Result<(Tensor, Tensor)>>,
}

impl Batches {
    pub(super) fn new(data: Arc<dyn Data>, config: &TrainConfig) -> crate::Result<Self> {
        let order = OrderConfig { rows: data.rows(), shuffle: config.shuffle, seed: config.seed };
        let own = data.clone();
        // In main memory: a device's work is queued by the thread that computes the steps.
        let read = move |rows: Vec<usize>| Ok(own.batch(&rows, &Device::Cpu));
        let loader = RunLoader::new(order, config.batch_size, read)
            .map_err(|error| Error::invalid("the data", "no rows", error.to_string()))?;
        Ok(Self { data, loader })
    }

    /// Returns this rank's rows of the next batch, as input and targets. `ranks` are those with different rows. The inner error
    /// is that of reading them, which other ranks do not have.
    pub(super) fn next(
        &mut self,
        ranks: &dyn Communicator,
        device: &Device,
    ) -> crate::Result<Result<(Tensor, Tensor)>> {
        let batch = match self.loader.batch(ranks.world_size(), ranks.rank()) {
            Err(error @ SamplerError::CollatePanicked { .. }) => Err(comm::carry(error)),
            batch => batch.map_err(refuse)?,
        };
        Ok(batch.and_then(|(input, targets)| Ok((input.to_device(device)?, targets.to_device(device)?))))
    }

    /// Returns the epoch of the next row.
    pub(super) fn epoch(&self) -> u64 {
        self.loader.order().epoch()
    }

    /// Returns the position in the data. What was read ahead does not count.
    pub(super) fn state(&self) -> SamplerState {
        self.loader.order().state()
    }

    /// Continues from a position in the data, without what was read ahead.
    pub(super) fn resume(&mut self, state: &SamplerState) -> crate::Result<()> {
        self.loader.resume(state).map_err(refuse)
    }
}

fn refuse(error: SamplerError) -> Error {
    Error::invalid("the data", "rows", error.to_string())
}
