//! Seeding of the random numbers of a step (dropout) of the documents' experiments. Language models derive theirs from the rows,
//! the same in every layout ([`ops::RowKeys`]).

use sampler::{SharedGenerator, split_mix};

/// A generator that is reseeded at each step from the run's seed, the rank and the step: ranks differ, runs are
/// reproducible, and a resumed run draws the same numbers as an uninterrupted one.
#[derive(Debug, Clone)]
pub struct StepRandom {
    /// The generator that layers draw from ([`ops::Dropout`]).
    pub generator: SharedGenerator,
    /// The run's seed.
    pub seed: u64,
}

impl StepRandom {
    /// Seeds the generator for this rank and step. Takes a few microseconds.
    pub fn begin(&self, rank: usize, step: usize) {
        let seed = step_seed(self.seed, rank as u64, step as u64);
        self.generator.with(|generator| generator.manual_seed(seed));
    }
}

/// Mixes the numbers, so that consecutive seeds, ranks and steps give unrelated sequences.
fn step_seed(seed: u64, rank: u64, step: u64) -> u64 {
    let mix = |number| split_mix(number, 1);
    mix(mix(mix(seed).wrapping_add(rank)).wrapping_add(step))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ranks_steps_and_seeds_do_not_share_numbers() {
        let seeds = (0..4).flat_map(|seed| {
            (0..8).flat_map(move |rank| (0..100).map(move |step| step_seed(seed, rank, step) as u32))
        });
        assert_eq!(seeds.collect::<HashSet<_>>().len(), 4 * 8 * 100);
    }
}
