//! Training data: rows that are accessed by index.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};
use models::tokens::{Row, Rows};
use ops::Documents;
use sampler::{OrderConfig, RunLoader, SamplerError, SamplerState};

use super::TrainConfig;
use crate::{Batch, Error};

/// Training data: rows, accessed by index.
pub trait Data: Send + Sync {
    /// Returns the number of rows.
    fn rows(&self) -> usize;

    /// Returns some rows: the model's input and targets (`Ok((input, targets).into())`), and the documents of packed rows. A [`Trainer`](super::Trainer) calls it on another thread, for batches
    /// in their order, up to three before the step that takes them, with the CPU as device; it moves them to the model's.
    ///
    /// # Errors
    /// Rows that cannot be read.
    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch>;

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

    fn batch(&self, rows: &[usize], device: &Device) -> Result<Batch> {
        let rows: Result<Vec<Row>> = rows.iter().map(|row| self.get(*row).map_err(comm::carry)).collect();
        let mut rows = rows?;
        let scored: Vec<_> = rows.iter_mut().map(|row| std::mem::take(&mut row.scored)).collect();
        let batch = batch_of(rows, self.row_len(), device)?;
        match self.labels() {
            Some(labels) => Ok(Batch { targets: labels.targets(&scored, self.row_len(), device)?, ..batch }),
            None => Ok(batch),
        }
    }

    fn fingerprint(&self) -> String {
        Rows::fingerprint(self)
    }
}

/// Returns a batch of rows of `len` tokens.
pub(super) fn batch_of(rows: Vec<Row>, len: usize, device: &Device) -> Result<Batch> {
    let shape = (rows.len(), len);
    let (mut tokens, mut targets, mut documents) = (Vec::new(), Vec::new(), Vec::new());
    for row in rows {
        tokens.extend(row.tokens);
        targets.extend(row.targets);
        documents.push(row.documents);
    }
    let is_packed = documents.iter().any(|row| !row.is_empty());
    // Among packed rows, one that is a stream is one document.
    documents.iter_mut().filter(|row| row.is_empty()).for_each(|row| row.push(len as u32));
    let input = Tensor::from_vec(tokens, shape, device)?;
    let documents = is_packed.then(|| Documents::new(documents)).transpose()?;
    Ok(Batch { documents, ..(input, Tensor::from_vec(targets, shape, device)?).into() })
}

/// This rank's batches of a run, in their order, read ahead of the steps.
pub(super) struct Batches {
    pub(super) data: Arc<dyn Data>,
    loader: RunLoader<Result<Batch>>,
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

    /// Returns this rank's rows of the next batch: of `ranks` ranks with different rows, those of number `rank`. The inner error
    /// is that of reading them, which other ranks do not have.
    pub(super) fn next(
        &mut self,
        (rank, ranks): (usize, usize),
        device: &Device,
    ) -> crate::Result<Result<Batch>> {
        let batch = match self.loader.batch(ranks, rank) {
            Err(error @ SamplerError::CollatePanicked { .. }) => Err(comm::carry(error)),
            batch => batch.map_err(refuse)?,
        };
        Ok(batch.and_then(|batch| {
            let (input, targets) = (batch.input.to_device(device)?, batch.targets.to_device(device)?);
            Ok(Batch { input, targets, ..batch })
        }))
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
