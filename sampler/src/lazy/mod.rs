//! Lazy permutation: PyTorch's `randperm` without the whole permutation in memory.

mod sparse;
mod window;

use crate::permutation::LONG;
use crate::{Generator, SamplerError};

use sparse::Sparse;
use window::Windows;

/// The numbers below a length, one at a time, in the order of [`Generator::randperm`] from a new generator: the same
/// sequence, in memory that grows with the count of numbers drawn.
///
/// # Cost
/// - Below 214,748,364 numbers, about 25 bytes and 300 nanoseconds for each number drawn; never more memory than the
///   permutation itself (four bytes a number), into which it is converted once that is smaller.
/// - From there on, PyTorch's shuffle cannot be computed from its beginning: each of its steps may move any number
///   placed before. It is computed in windows of about a thousandth of the numbers: each window draws all random
///   numbers again (about 10 seconds for a billion), and needs about 40 bytes for each number in it.
///   [`advance`](Self::advance) then costs nothing.
///
/// # Source
/// Fisher and Yates' shuffle on a sparse array; for long permutations, its "inside-out" form followed backwards.
///
/// ```
/// use sampler::{Generator, LazyPermutation};
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let mut lazy = LazyPermutation::new(42, 100_000_000);
/// let (first, second) = (lazy.next(), lazy.next());
/// # let mut short = LazyPermutation::new(42, 1000);
/// assert_eq!(LazyPermutation::new(42, 1000).collect::<Result<Vec<_>, _>>()?, Generator::new(42).randperm(1000)?);
/// # short.advance(998)?;
/// # assert_eq!(short.collect::<Result<Vec<_>, _>>()?, Generator::new(42).randperm(1000)?[998..]);
/// # assert_ne!(first.transpose()?, second.transpose()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct LazyPermutation {
    len: usize,
    position: usize,
    way: Method,
}

#[derive(Debug)]
enum Method {
    Sparse(Sparse),
    Windows(Windows),
}

impl LazyPermutation {
    /// Creates the permutation of the numbers below `len` that PyTorch's `randperm` makes from this seed.
    pub fn new(seed: u64, len: usize) -> Self {
        let generator = Generator::new(seed);
        let way = match len < LONG {
            true => Method::Sparse(Sparse::new(generator, len)),
            false => Method::Windows(Windows::new(generator, len)),
        };
        Self { len, position: 0, way }
    }

    /// Count of numbers drawn or skipped.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Skips the next `count` numbers, or as many as remain.
    ///
    /// # Errors
    /// If memory for the moved elements is exhausted.
    pub fn advance(&mut self, count: usize) -> Result<(), SamplerError> {
        let count = count.min(self.len - self.position);
        if let Method::Sparse(sparse) = &mut self.way {
            sparse.advance(self.position, count)?;
        }
        self.position += count;
        Ok(())
    }

    fn draw(&mut self) -> Result<usize, SamplerError> {
        let number = match &mut self.way {
            Method::Sparse(sparse) => sparse.draw(self.position)?,
            Method::Windows(windows) => windows.at(self.position)?,
        };
        self.position += 1;
        Ok(number)
    }
}

impl Iterator for LazyPermutation {
    type Item = Result<usize, SamplerError>;

    fn next(&mut self) -> Option<Self::Item> {
        (self.position < self.len).then(|| self.draw())
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.len - self.position;
        (left, Some(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_take_the_memory_of_those_drawn() {
        let mut lazy = LazyPermutation::new(7, LONG - 1);
        let mut first: Vec<usize> = lazy.by_ref().take(1000).map(|number| number.unwrap()).collect();
        let Method::Sparse(sparse) = &lazy.way else { unreachable!() };
        assert!(sparse.elements() <= 1000, "{}", sparse.elements());
        first.sort_unstable();
        first.dedup();
        assert!(first.len() == 1000 && first[999] < LONG - 1);
    }
}
