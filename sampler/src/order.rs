//! Row order of a run, batch by batch, across epochs.

use crate::allocation::reserved;
use crate::tail::share_len;
use crate::{LazyPermutation, SamplerError, SamplerState, Tail};

/// The order in which a run takes the rows of a data set. All ranks need the same values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OrderConfig {
    /// Number of rows in the data set. Default 0, which [`RunOrder::new`] refuses.
    pub rows: usize,
    /// Whether each epoch has its own random order. Default true.
    pub shuffle: bool,
    /// Base seed of the order, to which the epoch is added. Default 0, as in
    /// [`DistributedSampler`](crate::DistributedSampler).
    pub seed: u64,
}

impl Default for OrderConfig {
    fn default() -> Self {
        Self { rows: 0, shuffle: true, seed: 0 }
    }
}

/// The rows of a run: one epoch after another, each in the order of [`DistributedSampler`](crate::DistributedSampler)
/// (shuffled with `seed + epoch`, or ascending), each row exactly once per epoch.
///
/// A global batch is the next B rows, whatever the number of ranks; rank r of R takes its rows r, r + R, r + 2R and
/// so on. So if R divides B, and B the number of rows, a rank takes the same rows as with a `DistributedSampler`. The
/// last batch of an epoch is filled with the first rows of the next one.
///
/// # Cost
/// As [`LazyPermutation`]: memory and time for the rows taken, not for all rows of the data set.
///
/// ```
/// use sampler::{OrderConfig, RunOrder};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let config = OrderConfig { rows: 5, shuffle: false, ..OrderConfig::default() };
/// let mut order = RunOrder::new(config.clone())?;
/// assert_eq!(order.batch(4, 2, 1)?, [1, 3]); // rank 1 of 2
/// let state = order.state();
/// assert_eq!((state.epoch, state.consumed), (0, 4));
/// assert_eq!(order.batch(4, 2, 1)?, [0, 2]); // of 4, 0, 1, 2
///
/// let mut resumed = RunOrder::new(config)?; // of 4 ranks
/// resumed.resume(&state)?;
/// assert_eq!(resumed.batch(4, 4, 0)?, [4]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RunOrder {
    config: OrderConfig,
    epoch: u64,
    /// Number of rows of this epoch that were taken, always less than the total.
    consumed: usize,
    /// The permutation of this epoch, if it is shuffled and begun.
    permutation: Option<LazyPermutation>,
}

impl RunOrder {
    /// Creates the order from the beginning of epoch 0.
    ///
    /// # Errors
    /// A data set without rows.
    pub fn new(config: OrderConfig) -> Result<Self, SamplerError> {
        match config.rows {
            0 => Err(SamplerError::NoRows),
            _ => Ok(Self { config, epoch: 0, consumed: 0, permutation: None }),
        }
    }

    /// The configuration it was made with.
    pub fn config(&self) -> &OrderConfig {
        &self.config
    }

    /// The epoch of the next row.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The position in the data, to save in a checkpoint. It depends neither on the number of ranks nor on the batch
    /// size.
    pub fn state(&self) -> SamplerState {
        let OrderConfig { rows, shuffle, seed } = self.config;
        SamplerState { dataset_len: rows, seed, shuffle, epoch: self.epoch, consumed: self.consumed }
    }

    /// Resumes from a saved state, exact to the row, with any number of ranks and any batch size.
    ///
    /// # Errors
    /// A state with another data set length, seed or shuffling.
    ///
    /// # Cost
    /// For a shuffled epoch, the rows taken before are drawn again: about 5 seconds for 20 million.
    pub fn resume(&mut self, state: &SamplerState) -> Result<(), SamplerError> {
        state.check(self.config.rows, self.config.seed, self.config.shuffle)?;
        // A finished epoch, whose state from a `DistributedSampler` has `consumed` at its end.
        let is_over = state.consumed >= self.config.rows;
        self.epoch = state.epoch + u64::from(is_over);
        self.consumed = if is_over { 0 } else { state.consumed };
        self.permutation = None;
        Ok(())
    }

    /// Returns the rows that rank `rank` of `num_replicas` takes of the next `batch_size` rows. All ranks must make
    /// the same calls, apart from `rank`.
    ///
    /// If the batch size is not divisible by the number of ranks, the first ranks take one row more.
    ///
    /// # Errors
    /// If `batch_size` or `num_replicas` is 0, the rank is out of range, or memory is exhausted.
    pub fn batch(
        &mut self,
        batch_size: usize,
        num_replicas: usize,
        rank: usize,
    ) -> Result<Vec<usize>, SamplerError> {
        if batch_size == 0 {
            return Err(SamplerError::ZeroBatchSize);
        }
        let mut rows = reserved(share_len(batch_size, num_replicas, rank, Tail::Uneven)?, "a batch's rows")?;
        for place in 0..batch_size {
            let row = self.next_row()?;
            if place % num_replicas == rank {
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// Skips the next `count` rows, across the ends of epochs.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn advance(&mut self, count: usize) -> Result<(), SamplerError> {
        let left = self.config.rows - self.consumed;
        if count < left {
            if let Some(permutation) = &mut self.permutation {
                permutation.advance(count)?;
            }
            self.consumed += count;
            return Ok(());
        }
        let further = count - left;
        self.epoch = self.epoch.wrapping_add(1 + (further / self.config.rows) as u64);
        self.consumed = further % self.config.rows;
        self.permutation = None;
        Ok(())
    }

    fn next_row(&mut self) -> Result<usize, SamplerError> {
        let row = match self.config.shuffle {
            false => self.consumed,
            true => self.shuffled_row()?,
        };
        self.consumed += 1;
        if self.consumed == self.config.rows {
            (self.epoch, self.consumed, self.permutation) = (self.epoch.wrapping_add(1), 0, None);
        }
        Ok(row)
    }

    fn shuffled_row(&mut self) -> Result<usize, SamplerError> {
        let permutation = match &mut self.permutation {
            Some(permutation) => permutation,
            none => {
                let seed = self.config.seed.wrapping_add(self.epoch);
                let mut permutation = LazyPermutation::new(seed, self.config.rows);
                permutation.advance(self.consumed)?;
                none.insert(permutation)
            }
        };
        // Never `None`: `consumed` is less than the number of rows.
        permutation.next().unwrap_or(Ok(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DistributedSampler, DistributedSamplerConfig, Generator};

    fn order(rows: usize, seed: u64) -> RunOrder {
        RunOrder::new(OrderConfig { rows, seed, shuffle: true }).unwrap()
    }

    /// Combines what all ranks take of one batch, in the batch's order.
    fn on_ranks(orders: &mut [RunOrder], batch_size: usize) -> Vec<usize> {
        let ranks = orders.len();
        let parts: Vec<Vec<usize>> = (orders.iter_mut().enumerate())
            .map(|(rank, order)| order.batch(batch_size, ranks, rank).unwrap())
            .collect();
        (0..batch_size).map(|place| parts[place % ranks][place / ranks]).collect()
    }

    #[test]
    fn ranks_take_what_the_distributed_sampler_deals_out() {
        for (rank, shuffle) in [(0, true), (2, true), (1, false)] {
            let mut order = RunOrder::new(OrderConfig { rows: 48, seed: 9, shuffle }).unwrap();
            for epoch in 0..3 {
                let config = DistributedSamplerConfig {
                    dataset_len: 48,
                    num_replicas: 3,
                    rank,
                    shuffle,
                    seed: 9,
                    ..DistributedSamplerConfig::default()
                };
                let mut sampler = DistributedSampler::new(config).unwrap();
                crate::Sampler::set_epoch(&mut sampler, epoch);
                let rows: Vec<usize> = (0..8).flat_map(|_| order.batch(6, 3, rank).unwrap()).collect();
                assert_eq!(rows, sampler.iter().unwrap().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn each_row_comes_once_an_epoch_at_any_number_of_ranks_also_resumed() {
        let expected: Vec<usize> =
            (0..5).flat_map(|epoch| Generator::new(4 + epoch).randperm(23).unwrap()).collect();
        let (mut state, mut rows) = (order(23, 4).state(), Vec::new());
        for (ranks, batch_size) in [(1, 5), (3, 7), (2, 4), (4, 4), (5, 3), (2, 46), (1, 1)] {
            let mut orders: Vec<RunOrder> = (0..ranks).map(|_| order(23, 4)).collect();
            orders.iter_mut().for_each(|order| order.resume(&state).unwrap());
            for _ in 0..2 {
                if batch_size <= expected.len() - rows.len() {
                    // With more ranks than rows, the last ranks get none.
                    let part = match ranks <= batch_size {
                        true => on_ranks(&mut orders, batch_size),
                        false => {
                            assert_eq!(orders[4].batch(batch_size, ranks, 4).unwrap(), [0; 0]);
                            orders[0].advance(batch_size).unwrap();
                            expected[rows.len()..rows.len() + batch_size].to_vec()
                        }
                    };
                    rows.extend(part);
                }
            }
            state = orders[0].state();
        }
        assert_eq!(rows, expected[..rows.len()]);
        assert!(rows.len() > 69, "{}", rows.len());
    }

    #[test]
    fn skipping_is_drawing() {
        for count in [0, 1, 9, 10, 11, 20, 35] {
            let (mut skipped, mut drawn) = (order(10, 2), order(10, 2));
            for order in [&mut skipped, &mut drawn] {
                order.batch(3, 1, 0).unwrap();
            }
            skipped.advance(count).unwrap();
            for _ in 0..count {
                drawn.batch(1, 1, 0).unwrap();
            }
            assert_eq!(skipped.state(), drawn.state());
            assert_eq!(skipped.batch(12, 1, 0).unwrap(), drawn.batch(12, 1, 0).unwrap());
        }
    }

    #[test]
    fn mistakes_are_errors() {
        assert!(matches!(RunOrder::new(OrderConfig::default()), Err(SamplerError::NoRows)));
        let mut order = order(10, 1);
        assert!(matches!(order.batch(0, 1, 0), Err(SamplerError::ZeroBatchSize)));
        assert!(order.batch(1, 0, 0).is_err() && order.batch(1, 2, 2).is_err());
        let other = SamplerState { seed: 2, ..order.state() };
        assert!(order.resume(&other).unwrap_err().to_string().contains("seed is 2"));
        let whole = SamplerState { consumed: 10, ..order.state() };
        order.resume(&whole).unwrap();
        assert_eq!((order.epoch(), order.state().consumed), (1, 0));
    }
}
