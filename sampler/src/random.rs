//! Random sampler: every index in random order, from a generator that may be shared.

use std::sync::{Arc, Mutex, PoisonError};

use crate::permutation::Permutation;
use crate::{Generator, Indices, Sampler, SamplerError};

/// A generator shared by several users, like PyTorch's global generator.
///
/// ```
/// use sampler::{Generator, SharedGenerator};
///
/// let global = SharedGenerator::from(Generator::new(42));
/// let other = global.clone(); // the same generator
/// let first = global.with(|generator| generator.next_u32());
/// assert_ne!(first, other.with(|generator| generator.next_u32()));
/// ```
#[derive(Clone, Debug)]
pub struct SharedGenerator(Arc<Mutex<Generator>>);

impl SharedGenerator {
    /// Calls `draw` with exclusive access to the generator. Using the same generator again inside `draw` deadlocks.
    pub fn with<T>(&self, draw: impl FnOnce(&mut Generator) -> T) -> T {
        draw(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl From<Generator> for SharedGenerator {
    fn from(generator: Generator) -> Self {
        Self(Arc::new(Mutex::new(generator)))
    }
}

/// Every index of a data set in a new random order each epoch: `DataLoader(shuffle=True)` in one process.
///
/// Each epoch draws two 63-bit integers from the generator, as PyTorch's loader and sampler do; the second seeds that
/// epoch's `randperm`. So with PyTorch's seed, and the same draws before, the order is PyTorch's.
///
/// # Cost
///
/// Four bytes for each index of the data set (eight from 2^32 samples on), during an epoch.
///
/// ```
/// use sampler::{Generator, RandomSampler, Sampler};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let mut sampler = RandomSampler::new(5, Generator::new(42));
/// let mut order: Vec<usize> = sampler.indices()?.collect();
/// order.sort();
/// assert_eq!(order, [0, 1, 2, 3, 4]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RandomSampler {
    dataset_len: usize,
    generator: SharedGenerator,
}

impl RandomSampler {
    /// Creates a sampler for a data set of the given length, with a [`Generator`] of its own or a
    /// [`SharedGenerator`].
    pub fn new(dataset_len: usize, generator: impl Into<SharedGenerator>) -> Self {
        Self { dataset_len, generator: generator.into() }
    }
}

impl Sampler for RandomSampler {
    fn len(&self) -> usize {
        self.dataset_len
    }

    fn indices(&mut self) -> Result<Indices, SamplerError> {
        let seed = self.generator.with(|generator| {
            generator.next_i63(); // PyTorch's loader draws this one for its workers.
            generator.next_i63()
        });
        let order = Permutation::new(seed, self.dataset_len)?;
        Ok(Box::new((0..self.dataset_len).map(move |position| order.at(position))))
    }

    fn index_bound(&self) -> Option<usize> {
        Some(self.dataset_len)
    }
}
