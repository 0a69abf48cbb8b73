//! Fisher and Yates' shuffle on a sparse array: only moved elements are stored.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::allocation::reserved;
use crate::{Generator, SamplerError};

/// A full array takes less memory than a table of moved elements if it has fewer than this many times as many
/// elements.
const DENSE: usize = 8;

/// State of a shuffle: the array from the current position on.
#[derive(Debug)]
pub(super) struct Sparse {
    generator: Generator,
    len: usize,
    rest: Remaining,
}

#[derive(Debug)]
enum Remaining {
    /// Elements by position where they were moved; any other position i holds i.
    Moved(HashMap<u32, u32, BuildHasherDefault<FibonacciHasher>>),
    /// All elements from position `first` on.
    All { first: usize, elements: Vec<u32> },
}

impl Sparse {
    /// For fewer than 2^32 elements.
    pub(super) fn new(generator: Generator, len: usize) -> Self {
        Self { generator, len, rest: Remaining::Moved(HashMap::default()) }
    }

    /// Returns the element at a position; positions must be requested in order.
    pub(super) fn draw(&mut self, position: usize) -> Result<usize, SamplerError> {
        let left = self.len - position;
        // PyTorch draws no random number for the last position.
        let offset = if left > 1 { self.generator.next_u32() as usize % left } else { 0 };
        if matches!(&self.rest, Remaining::Moved(moved) if moved.len() >= left / DENSE && left > DENSE) {
            self.keep_all(position)?;
        }
        match &mut self.rest {
            Remaining::Moved(moved) => {
                let here = moved.remove(&(position as u32)).unwrap_or(position as u32);
                if offset == 0 {
                    return Ok(here as usize);
                }
                let len = moved.len();
                if len == moved.capacity() {
                    let no_memory = |_| SamplerError::OutOfMemory { what: "a permutation", len };
                    moved.try_reserve(1).map_err(no_memory)?;
                }
                let there = (position + offset) as u32;
                Ok(moved.insert(there, here).unwrap_or(there) as usize)
            }
            Remaining::All { first, elements } => {
                let here = position - *first;
                elements.swap(here, here + offset);
                Ok(elements[here] as usize)
            }
        }
    }

    /// Draws from `position` on without returning the elements.
    pub(super) fn advance(&mut self, position: usize, count: usize) -> Result<(), SamplerError> {
        // So many draws would end the sparse form anyway.
        if count >= (self.len - position) / DENSE && count > 0 {
            self.keep_all(position)?;
        }
        (position..position + count).try_for_each(|position| self.draw(position).map(drop))
    }

    fn keep_all(&mut self, position: usize) -> Result<(), SamplerError> {
        let Remaining::Moved(moved) = &self.rest else { return Ok(()) };
        let mut elements = reserved(self.len - position, "a permutation")?;
        elements.extend(position as u32..self.len as u32);
        for (place, element) in moved {
            elements[*place as usize - position] = *element;
        }
        self.rest = Remaining::All { first: position, elements };
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn elements(&self) -> usize {
        match &self.rest {
            Remaining::Moved(moved) => moved.len(),
            Remaining::All { elements, .. } => elements.len(),
        }
    }
}

/// Fibonacci hashing: positions are spread already, and no adversary can choose them to collide.
#[derive(Debug, Default)]
pub(super) struct FibonacciHasher(u64);

impl Hasher for FibonacciHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u32(&mut self, place: u32) {
        self.write_u64(u64::from(place));
    }

    fn write_u64(&mut self, place: u64) {
        self.0 = (self.0 ^ place).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(26);
    }
}
