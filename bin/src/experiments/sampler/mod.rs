//! `sampler`, the PyTorch handbook: which rank gets which samples, with a plain and with a distributed sampler.

mod comparison;
mod coverage;
mod epochs;
mod options;

pub use options::{SamplerOptions, Tail};

use crate::console::note;
use crate::error::Result;

impl SamplerOptions {
    /// Deals a data set out and prints what comes to whom. It takes no ranks: a sampler only computes.
    ///
    /// # Errors
    /// A wrong option; a data set that does not fit in memory; standard output that cannot be written.
    pub fn run(&self) -> Result<()> {
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

/// Looks at each of many indices; how many there are, and the first few.
fn look(
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

fn ranks(count: usize) -> String {
    format!("{count} {}", if count == 1 { "rank" } else { "ranks" })
}
