//! `Dataset`: the trait that a data loader reads samples from.

use crate::BoxError;

/// A collection of samples, accessed by index.
///
/// Workers share one data set, so `get` takes `&self` and must be callable from several threads at once.
///
/// ```
/// use sampler::{BoxError, Dataset};
///
/// struct Squares;
///
/// impl Dataset for Squares {
///     type Item = usize;
///
///     fn len(&self) -> usize {
///         100
///     }
///
///     fn get(&self, index: usize) -> Result<usize, BoxError> {
///         index.checked_mul(index).ok_or_else(|| format!("the square of {index} is too large").into())
///     }
/// }
/// ```
pub trait Dataset: Send + Sync {
    /// Type of a sample.
    type Item;

    /// Number of samples.
    fn len(&self) -> usize;

    /// Whether there is no sample.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the sample at an index below [`len`](Self::len).
    ///
    /// # Errors
    ///
    /// Any failure to read the sample. A loader reports the error with the batch and the sample, and continues.
    fn get(&self, index: usize) -> Result<Self::Item, BoxError>;
}

impl<T: Clone + Send + Sync> Dataset for Vec<T> {
    type Item = T;

    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn get(&self, index: usize) -> Result<T, BoxError> {
        let sample = self.as_slice().get(index).cloned();
        sample.ok_or_else(|| {
            format!("index {index} is out of range: there are {} samples", Vec::len(self)).into()
        })
    }
}
