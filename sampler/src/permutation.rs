//! PyTorch's `randperm`, and a permutation stored in as few bytes as its length allows.

use crate::allocation::reserved;
use crate::{Generator, SamplerError};

/// From this length on, PyTorch draws 64 bits for each element and uses the inside-out shuffle.
pub(crate) const LONG: usize = (u32::MAX / 20) as usize;

impl Generator {
    /// Returns the numbers from 0 to `len` (exclusive) in random order: `torch.randperm(len)`.
    ///
    /// # Errors
    ///
    /// If memory is exhausted.
    pub fn randperm(&mut self, len: usize) -> Result<Vec<usize>, SamplerError> {
        shuffled(self, len, |index| index)
    }
}

/// Returns the numbers from 0 to `len` (exclusive) in the order of `torch.randperm(len)`, each converted by `from`.
///
/// # Source
///
/// Fisher and Yates' shuffle, forwards below 214,748,364 elements and "inside-out" from there on, as in PyTorch.
pub(crate) fn shuffled<T>(
    generator: &mut Generator,
    len: usize,
    from: impl Fn(usize) -> T,
) -> Result<Vec<T>, SamplerError> {
    let mut order = reserved(len, "a permutation")?;
    if len < LONG {
        forwards(generator, &mut order, len, from)
    } else {
        inside_out(generator, &mut order, len, from)
    }
    Ok(order)
}

fn forwards<T>(generator: &mut Generator, order: &mut Vec<T>, len: usize, from: impl Fn(usize) -> T) {
    order.extend((0..len).map(from));
    for i in 0..len.saturating_sub(1) {
        let offset = generator.next_u32() % (len - i) as u32;
        order.swap(i, i + offset as usize);
    }
}

pub(crate) fn inside_out<T>(
    generator: &mut Generator,
    order: &mut Vec<T>,
    len: usize,
    from: impl Fn(usize) -> T,
) {
    for i in 0..len {
        let other = generator.next_u64() % (i as u64 + 1);
        order.push(from(i));
        order.swap(i, other as usize);
    }
}

/// A permutation of the numbers below its length.
#[derive(Debug)]
pub(crate) enum Permutation {
    /// Four bytes for each number, if the length fits in `u32`.
    Narrow(Vec<u32>),
    /// Eight bytes for each number.
    Wide(Vec<usize>),
}

impl Permutation {
    /// Creates the permutation that PyTorch's `randperm` makes from a new generator with this seed.
    pub(crate) fn new(seed: u64, len: usize) -> Result<Self, SamplerError> {
        let mut generator = Generator::new(seed);
        Ok(match u32::try_from(len) {
            Ok(_) => Self::Narrow(shuffled(&mut generator, len, |index| index as u32)?),
            Err(_) => Self::Wide(shuffled(&mut generator, len, |index| index)?),
        })
    }

    /// Returns the number at a position below the length.
    pub(crate) fn at(&self, position: usize) -> usize {
        match self {
            Self::Narrow(order) => order[position] as usize,
            Self::Wide(order) => order[position],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_and_wide_agree() {
        let wide = Generator::new(8).randperm(1000).unwrap();
        let narrow = Permutation::new(8, 1000).unwrap();
        assert!(matches!(narrow, Permutation::Narrow(_)));
        assert!(wide.iter().enumerate().all(|(position, &index)| narrow.at(position) == index));
    }

    /// Compares with the textbook form: the new element takes the drawn position, and the element there moves to the
    /// end. (It was compared once with PyTorch 2.15 itself, at the shortest length that is shuffled this way, which
    /// takes 860 MB.)
    #[test]
    fn long_permutations_shuffle_inside_out() {
        let mut order = Vec::new();
        inside_out(&mut Generator::new(3), &mut order, 1000, |index| index);
        let mut generator = Generator::new(3);
        let mut expected = vec![usize::MAX; 1000];
        for i in 0..expected.len() {
            let place = (generator.next_u64() % (i as u64 + 1)) as usize;
            expected[i] = expected[place];
            expected[place] = i;
        }
        assert_eq!(order, expected);
        assert_eq!(LONG, 214_748_364);
    }
}
