//! The handbook's `compare_samplers`: the sample order of one process, and the share of each rank.

use cli::prelude::*;
use sampler::{Generator, RandomSampler, Sampler, SequentialSampler, SharedGenerator};

use super::coverage::Coverage;
use super::{SamplerOptions, inspect_indices};

/// Features per sample in the handbook's data set. Only labels are printed, but the features are drawn first.
const FEATURES: usize = 10;

/// The handbook's data set, and the generator after drawing it.
pub(super) struct Data {
    labels: Vec<i64>,
    generator: Generator,
}

impl Data {
    pub(super) fn draw(options: &SamplerOptions) -> Result<Self> {
        let bytes = options.compared as f64 * (FEATURES * size_of::<f32>()) as f64;
        memory_check::check_data("--compared", options.compared, bytes, 1)?;
        let mut generator = Generator::new(options.seed);
        generator.randn(options.compared.saturating_mul(FEATURES))?;
        let labels = generator.randint(options.compared, 0, 2)?;
        Ok(Self { labels, generator })
    }
}

pub(super) fn run(options: &SamplerOptions, data: Data) -> Result<()> {
    let Data { labels, generator } = data;
    let mut plain: Box<dyn Sampler> = match options.no_shuffle {
        false => Box::new(RandomSampler::new(options.compared, SharedGenerator::from(generator))),
        true => Box::new(SequentialSampler::new(options.compared)),
    };
    let (count, first) = inspect_indices(plain.indices()?, 20, |_| ());
    say(format_args!("\n===== plain sampler (one process) ====="))?;
    say(format_args!("samples: {}", count))?;
    say(format_args!("sample indices: {first:?}..."))?;

    say(format_args!("\n===== distributed sampler ({}) =====", counted(options.world_size, "rank")))?;
    let mut coverage = Coverage::new(options.compared)?;
    for rank in 0..options.world_size {
        let indices = options.sampler(options.compared, rank)?.iter()?;
        let (count, first) = inspect_indices(indices, 10, |index| coverage.add(rank, index));
        let of_first: Vec<i64> = first.iter().map(|index| labels[*index]).collect();
        say(format_args!("rank {rank} has {count} samples"))?;
        say(format_args!("  first 10 indices: {first:?}"))?;
        say(format_args!("  their labels: {of_first:?}"))?;
    }
    say(format_args!("all ranks together: {coverage}"))
}
