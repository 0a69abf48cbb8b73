//! Training data: rows that are accessed by index.

use candle_core::{Device, Result, Tensor};
use comm::Communicator;
use models::tokens::Rows;
use sampler::{OrderConfig, RunOrder, SamplerError, SamplerState};

use super::TrainConfig;
use crate::Error;

/// Training data: rows, accessed by index.
pub trait Data: Send + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Returns some rows as the model's input and targets.
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

/// The batches of a run, in their order.
pub(super) struct Batches<'a> {
    pub(super) data: &'a dyn Data,
    order: RunOrder,
    batch_size: usize,
}

impl<'a> Batches<'a> {
    pub(super) fn new(data: &'a dyn Data, config: &TrainConfig) -> crate::Result<Self> {
        let order = OrderConfig { rows: data.rows(), shuffle: config.shuffle, seed: config.seed };
        let order =
            RunOrder::new(order).map_err(|error| Error::invalid("the data", "no rows", error.to_string()))?;
        Ok(Self { data, order, batch_size: config.batch_size })
    }

    /// Returns this rank's rows of the next batch, as input and targets. `ranks` are those with different rows. The inner error
    /// is that of reading them, which other ranks do not have.
    pub(super) fn next(
        &mut self,
        ranks: &dyn Communicator,
        device: &Device,
    ) -> crate::Result<Result<(Tensor, Tensor)>> {
        let rows = self.order.batch(self.batch_size, ranks.world_size(), ranks.rank()).map_err(refuse)?;
        Ok(self.data.batch(&rows, device))
    }

    /// Returns the epoch of the next row.
    pub(super) fn epoch(&self) -> u64 {
        self.order.epoch()
    }

    /// Returns the position in the data.
    pub(super) fn state(&self) -> SamplerState {
        self.order.state()
    }

    /// Continues from a position in the data.
    pub(super) fn resume(&mut self, state: &SamplerState) -> crate::Result<()> {
        self.order.resume(state).map_err(refuse)
    }
}

fn refuse(error: SamplerError) -> Error {
    Error::invalid("the data", "rows", error.to_string())
}
