//! `sampler`, from the PyTorch handbook: which rank gets which samples, with a plain and a distributed sampler.

use cli::prelude::*;

mod comparison;
mod coverage;
mod epochs;
mod options;

pub(crate) use options::SamplerOptions;

impl SamplerOptions {
    /// Divides a data set and prints each rank's share. No ranks are started, as a sampler needs no communication.
    ///
    /// # Errors
    /// A wrong option; a data set that does not fit in memory; standard output that cannot be written.
    pub(crate) fn run(&self) -> Result<()> {
        self.check()?;
        let compared = comparison::Data::draw(self)?;
        let epochs = epochs::Epochs::new(self)?;
        note(format_args!(
            "the PyTorch handbook prints a batch's places in its rank's share as its sample indices, and numbers that no sampler \
             gave as those of the plain sampler; this run prints the places, and below them what the samplers give"
        ));
        epochs.run(self)?;
        comparison::run(self, compared)
    }
}

/// Calls `each` for every index; returns their number, and the first `shown` of them.
fn inspect_indices(
    indices: impl Iterator<Item = usize>,
    shown: usize,
    mut each: impl FnMut(usize),
) -> (usize, Vec<usize>) {
    let (mut count, mut first) = (0, Vec::new());
    for index in indices {
        if first.len() < shown {
            first.push(index);
        }
        count += 1;
        each(index);
    }
    (count, first)
}
