//! Loader of a run's batches, read ahead.

use std::sync::Arc;

use crate::batch::RowBatches;
use crate::fetch::{Collate, Fetch};
use crate::workers::Workers;
use crate::{BoxError, Dataset, OrderConfig, RunOrder, SamplerError, SamplerState};

/// Batches that are being read or wait, besides the one in use.
const PREFETCHED: usize = 2;

/// One rank's batches of a run, in the order of a [`RunOrder`], each read by a thread while the ones before it are in use.
///
/// `B` is what `read` returns for a batch's rows.
///
/// # Cost
/// A thread, and at most two batches besides the one in use.
///
/// ```
/// use sampler::{OrderConfig, RunLoader};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let config = OrderConfig { rows: 5, shuffle: false, ..OrderConfig::default() };
/// let mut loader = RunLoader::new(config, 4, |rows| Ok(rows))?;
/// assert_eq!(loader.batch(2, 1)?, [1, 3]); // rank 1 of 2
/// let state = loader.order().state();
/// assert_eq!(state.consumed, 4); // whatever has been read ahead
/// assert_eq!(loader.batch(2, 1)?, [0, 2]);
/// loader.resume(&state)?;
/// assert_eq!(loader.batch(4, 0)?, [4]); // rank 0 of 4
/// # Ok(())
/// # }
/// ```
pub struct RunLoader<B> {
    fetch: Fetch<RowNumbers, B>,
    /// Position of the next batch that [`batch`](Self::batch) returns. It draws no row itself.
    order: RunOrder,
    batch_size: usize,
    ahead: Option<Ahead<B>>,
}

/// What is read ahead: the batches of one of so many ranks.
struct Ahead<B> {
    num_replicas: usize,
    rank: usize,
    workers: Workers<RowNumbers, B>,
}

impl<B: Send + 'static> RunLoader<B> {
    /// Creates the loader at the beginning of the run. `read` returns the batch of some rows; it is called once for each batch,
    /// in their order.
    ///
    /// # Errors
    /// A data set without rows; a batch size of 0.
    pub fn new(
        config: OrderConfig,
        batch_size: usize,
        read: impl Fn(Vec<usize>) -> Result<B, BoxError> + Send + Sync + 'static,
    ) -> Result<Self, SamplerError> {
        if batch_size == 0 {
            return Err(SamplerError::ZeroBatchSize);
        }
        let order = RunOrder::new(config)?;
        let collate: Arc<Collate<usize, B>> = Arc::new(read);
        let fetch = Fetch { dataset: Arc::new(RowNumbers(order.config().rows)), collate };
        Ok(Self { fetch, order, batch_size, ahead: None })
    }

    /// Returns the next batch of rank `rank` of `num_replicas`, as [`RunOrder::batch`] divides it. If these are others than
    /// before, what was read ahead is dropped.
    ///
    /// # Errors
    /// Those of [`RunOrder::batch`]; an error or a panic of `read`, for this batch; a thread that cannot be started.
    pub fn batch(&mut self, num_replicas: usize, rank: usize) -> Result<B, SamplerError> {
        let is_same = |ahead: &Ahead<B>| (ahead.num_replicas, ahead.rank) == (num_replicas, rank);
        let ahead = match self.ahead.take().filter(is_same) {
            Some(ahead) => ahead,
            None => {
                let mut order = RunOrder::new(self.order.config().clone())?;
                order.resume(&self.order.state())?;
                let rows = Share { order, batch_size: self.batch_size, num_replicas, rank };
                let workers = Workers::start(self.fetch.clone(), Box::new(rows), 1, PREFETCHED)?;
                Ahead { num_replicas, rank, workers }
            }
        };
        let ahead = self.ahead.insert(ahead);
        let Some(loaded) = ahead.workers.next() else { return Err(SamplerError::NoRows) };
        match loaded.batch {
            read @ (Ok(_) | Err(SamplerError::Collate { .. } | SamplerError::CollatePanicked { .. })) => {
                self.order.advance(self.batch_size)?;
                read
            }
            // The rows could not be drawn, and the thread has ended.
            failed => {
                self.ahead = None;
                failed
            }
        }
    }

    /// The order, at the next batch: batches that were read ahead do not count.
    pub fn order(&self) -> &RunOrder {
        &self.order
    }

    /// Resumes from a saved state of the [`order`](Self::order). What was read ahead is dropped.
    ///
    /// # Errors
    /// Those of [`RunOrder::resume`].
    pub fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        self.ahead = None;
        self.order.resume(state)
    }
}

/// A rank's rows of the batches of a run, without end.
struct Share {
    order: RunOrder,
    batch_size: usize,
    num_replicas: usize,
    rank: usize,
}

impl RowBatches for Share {
    fn next_into(&mut self, out: &mut Vec<usize>) -> Result<bool, SamplerError> {
        *out = self.order.batch(self.batch_size, self.num_replicas, self.rank)?;
        Ok(true)
    }
}

/// Rows that stand for themselves, since a whole batch of them is read at once.
struct RowNumbers(usize);

impl Dataset for RowNumbers {
    type Item = usize;

    fn len(&self) -> usize {
        self.0
    }

    fn get(&self, index: usize) -> Result<usize, BoxError> {
        Ok(index)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn config() -> OrderConfig {
        OrderConfig { rows: 11, seed: 3, ..OrderConfig::default() }
    }

    #[test]
    fn batches_are_those_of_the_order_also_resumed_and_with_other_ranks() {
        let (mut order, mut loader) =
            (RunOrder::new(config()).unwrap(), RunLoader::new(config(), 5, Ok).unwrap());
        for (ranks, rank) in [(1, 0), (2, 1), (2, 1), (2, 1), (2, 0), (5, 4), (3, 0)] {
            let state = order.state();
            let expected = order.batch(5, ranks, rank).unwrap();
            assert_eq!(loader.batch(ranks, rank).unwrap(), expected);
            assert_eq!(loader.order().state(), order.state());
            // Once more, as after the loss of a rank.
            loader.resume(&state).unwrap();
            assert_eq!(loader.batch(ranks, rank).unwrap(), expected);
            assert_eq!(loader.order().epoch(), order.epoch());
        }
    }

    #[test]
    fn an_error_comes_with_its_batch_and_the_next_one_after_it() {
        let reads = Arc::new(Mutex::new(Vec::new()));
        let own = reads.clone();
        let read = move |rows: Vec<usize>| {
            own.lock().unwrap().push(rows.clone());
            match rows.contains(&4) {
                true => Err("no row 4".into()),
                false => Ok(rows),
            }
        };
        let config = OrderConfig { shuffle: false, ..config() };
        let mut loader = RunLoader::new(config, 3, read).unwrap();
        assert_eq!(loader.batch(1, 0).unwrap(), [0, 1, 2]);
        assert!(loader.batch(1, 0).unwrap_err().to_string().contains("no row 4"));
        assert_eq!(loader.batch(1, 0).unwrap(), [6, 7, 8]);
        assert!(loader.batch(1, 1).is_err());
        drop(loader);
        let reads = reads.lock().unwrap();
        assert_eq!(reads[..3], [vec![0, 1, 2], vec![3, 4, 5], vec![6, 7, 8]]);
        assert!(reads.len() <= 3 + PREFETCHED);
    }
}
