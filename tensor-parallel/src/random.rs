//! Random streams for dropout of this crate's own layers: one that the ranks of a group share, and one per rank. What
//! `girandole::Parallel` trains has masks that do not depend on the layout instead ([`ops::RowKeys`]).

use sampler::{Generator, SharedGenerator, split_mix};

/// The random streams that dropout draws from. For activations that every rank of the tensor-parallel group holds, dropout
/// must be the same on each; for those that are divided over the ranks, it must differ.
///
/// Both streams differ between data-parallel ranks, which have different samples.
///
/// # Source
/// Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021): the two
/// states of its random number tracker.
#[derive(Debug, Clone)]
pub struct RandomStreams {
    equal: SharedGenerator,
    own: SharedGenerator,
    seeds: [u64; 2],
}

impl RandomStreams {
    /// Creates the streams of one rank, from the run's seed and its ranks along the two axes.
    ///
    /// ```
    /// use tensor_parallel::RandomStreams;
    ///
    /// let ranks = [RandomStreams::new(42, 0, 0), RandomStreams::new(42, 0, 1)];
    /// let draw = |stream: &sampler::SharedGenerator| stream.with(|generator| generator.next_u64());
    /// assert_eq!(draw(ranks[0].equal()), draw(ranks[1].equal()));
    /// assert_ne!(draw(ranks[0].own()), draw(ranks[1].own()));
    /// ```
    pub fn new(seed: u64, dp_rank: usize, tp_rank: usize) -> Self {
        let equal = mix(mix(seed).wrapping_add(dp_rank as u64));
        let own = mix(equal.wrapping_add(1 + tp_rank as u64));
        let generator = |seed| SharedGenerator::from(Generator::new(seed));
        Self { equal: generator(equal), own: generator(own), seeds: [equal, own] }
    }

    /// Returns the stream that is the same on every rank of the tensor-parallel group: for activations that all of them hold.
    pub fn equal(&self) -> &SharedGenerator {
        &self.equal
    }

    /// Returns this rank's own stream: for activations that are divided over the ranks.
    pub fn own(&self) -> &SharedGenerator {
        &self.own
    }

    /// Sets both streams to the start of a step, so that a run resumed from a checkpoint draws the same numbers as an
    /// uninterrupted one.
    pub fn begin_step(&self, step: u64) {
        for (stream, seed) in [&self.equal, &self.own].into_iter().zip(self.seeds) {
            stream.with(|generator| generator.manual_seed(mix(seed.wrapping_add(step))));
        }
    }
}

/// Hashes a number, so that consecutive seeds give unrelated streams.
fn mix(number: u64) -> u64 {
    split_mix(number, 1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn streams_do_not_share_numbers_and_begin_anew_at_each_step() {
        let mut first = HashSet::new();
        for (dp, tp) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let streams = RandomStreams::new(7, dp, tp);
            for step in 0..50 {
                streams.begin_step(step);
                let own = streams.own().with(|generator| generator.next_u64());
                assert!(first.insert(own));
                let equal = streams.equal().with(|generator| generator.next_u64());
                assert_eq!(first.insert(equal), tp == 0, "the second rank draws what the first has drawn");
                streams.begin_step(step);
                assert_eq!(streams.own().with(|generator| generator.next_u64()), own);
            }
        }
    }
}
