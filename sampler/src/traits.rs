//! `Sampler`: the trait of all samplers.

use crate::SamplerError;

/// One epoch's indices, computed lazily.
pub type Indices = Box<dyn Iterator<Item = usize> + Send>;

/// The order in which one rank reads a data set.
///
/// The trait is object-safe: a [`DataLoader`](crate::DataLoader) takes a `Box<dyn Sampler>` as well as a plain one.
///
/// ```
/// use sampler::{Sampler, SequentialSampler};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let mut sampler: Box<dyn Sampler> = Box::new(SequentialSampler::new(3));
/// assert_eq!(sampler.indices()?.collect::<Vec<_>>(), [0, 1, 2]);
/// # Ok(())
/// # }
/// ```
pub trait Sampler: Send {
    /// Number of indices in the next epoch.
    fn len(&self) -> usize;

    /// Whether the next epoch has no index.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Begins an epoch. A sampler that draws random numbers draws them here.
    ///
    /// # Errors
    ///
    /// If the order cannot be made because memory is exhausted.
    fn indices(&mut self) -> Result<Indices, SamplerError>;

    /// Sets the epoch that [`indices`](Self::indices) begins next. Samplers whose order does not depend on it ignore
    /// it.
    fn set_epoch(&mut self, _epoch: u64) {}

    /// Exclusive upper bound of the indices, if known: the length of the data set that this sampler is for.
    fn index_bound(&self) -> Option<usize> {
        None
    }
}

impl<S: Sampler + ?Sized> Sampler for Box<S> {
    fn len(&self) -> usize {
        (**self).len()
    }

    fn indices(&mut self) -> Result<Indices, SamplerError> {
        (**self).indices()
    }

    fn set_epoch(&mut self, epoch: u64) {
        (**self).set_epoch(epoch);
    }

    fn index_bound(&self) -> Option<usize> {
        (**self).index_bound()
    }
}
