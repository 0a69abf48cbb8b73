//! Windows of the "inside-out" shuffle. Its step i draws a position from those up to i, moves the element there to
//! position i, and puts element i at the drawn position.

use std::collections::{BinaryHeap, HashMap};
use std::hash::BuildHasherDefault;
use std::ops::Range;

use crate::allocation::reserved;
use crate::{Generator, SamplerError};

use super::sparse::FibonacciHasher;

/// Number of steps between two stored generators, and of random numbers drawn at a time.
const BLOCK: usize = 1 << 17;
/// Minimum length of a window.
const WINDOW: usize = 1 << 20;
/// Maximum number of windows, up to rounding.
const WINDOWS: usize = 1 << 10;

/// A permutation of which one window at a time is in memory.
#[derive(Debug)]
pub(super) struct Windows {
    start: Generator,
    len: usize,
    block: usize,
    window: usize,
    /// The generator at the beginning of every block, once the random numbers have been drawn.
    blocks: Vec<Generator>,
    range: Range<usize>,
    elements: Vec<usize>,
}

impl Windows {
    pub(super) fn new(start: Generator, len: usize) -> Self {
        Self::of(start, len, BLOCK.max(len / BLOCK), WINDOW.max(len / WINDOWS))
    }

    fn of(start: Generator, len: usize, block: usize, window: usize) -> Self {
        Self { start, len, block, window, blocks: Vec::new(), range: 0..0, elements: Vec::new() }
    }

    /// Returns the element at a position below the length.
    pub(super) fn at(&mut self, position: usize) -> Result<usize, SamplerError> {
        if !self.range.contains(&position) {
            let first = position - position % self.window;
            self.compute(first..self.len.min(first + self.window))?;
        }
        Ok(self.elements[position - self.range.start])
    }

    /// Computes the window `range`.
    ///
    /// Follows the element at each position after the last step backwards through the steps. If step i drew the
    /// position, element i is there. If the position is i itself, its element came from the position that step i
    /// drew.
    fn compute(&mut self, range: Range<usize>) -> Result<(), SamplerError> {
        self.keep_generators()?;
        let mut sought = UnresolvedPositions::new(range.clone())?;
        let mut drawn = reserved(self.block, "random numbers")?;
        for (number, generator) in self.blocks.iter().enumerate().rev() {
            let (first, mut generator) = (number * self.block, generator.clone());
            let steps = first..self.len.min(first + self.block);
            drawn.clear();
            drawn.extend(steps.clone().map(|step| generator.next_u64() % (step as u64 + 1)));
            steps.zip(&drawn).rev().for_each(|(step, position)| sought.step_back(step, *position as usize));
        }
        (self.range, self.elements) = (range, sought.found);
        Ok(())
    }

    /// Draws all random numbers once, to store the generator of each block.
    fn keep_generators(&mut self) -> Result<(), SamplerError> {
        if !self.blocks.is_empty() {
            return Ok(());
        }
        let mut blocks = reserved(self.len.div_ceil(self.block), "random number generators")?;
        let mut generator = self.start.clone();
        for first in (0..self.len).step_by(self.block) {
            blocks.push(generator.clone());
            for _ in first..self.len.min(first + self.block) {
                generator.next_u64();
            }
        }
        self.blocks = blocks;
        Ok(())
    }
}

/// Positions whose element is not known yet.
struct UnresolvedPositions {
    /// Index in the window, by position.
    places: HashMap<u64, usize, BuildHasherDefault<FibonacciHasher>>,
    /// Bloom filter with one hash: if a position's bit is 0, as in nearly all look-ups, it is not in `places`. It is
    /// small enough for the cache.
    bits: Vec<u64>,
    /// Positions in a heap: the largest is the next one that a step moves.
    largest: BinaryHeap<usize>,
    found: Vec<usize>,
}

impl UnresolvedPositions {
    fn new(range: Range<usize>) -> Result<Self, SamplerError> {
        let len = range.len();
        let no_memory = |_| SamplerError::OutOfMemory { what: "part of a permutation", len };
        let mut places = HashMap::default();
        places.try_reserve(len).map_err(no_memory)?;
        // 16 bits for each position, rounded up to a power of two of words.
        let words = len.div_ceil(4).next_power_of_two();
        let mut bits = reserved(words, "part of a permutation")?;
        bits.resize(words, 0);
        let mut largest = BinaryHeap::new();
        largest.try_reserve(len).map_err(no_memory)?;
        let mut found = reserved(len, "part of a permutation")?;
        found.resize(len, 0);
        let mut sought = Self { places, bits, largest, found };
        range.enumerate().for_each(|(place, position)| sought.add(position, place));
        Ok(sought)
    }

    fn add(&mut self, position: usize, place: usize) {
        let (word, bit) = self.bit(position);
        self.bits[word] |= bit;
        self.places.insert(position as u64, place);
        self.largest.push(position);
    }

    fn bit(&self, position: usize) -> (usize, u64) {
        let hash = (position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        ((hash >> 26) as usize & (self.bits.len() - 1), 1 << (hash >> 58))
    }

    /// Undoes step `step`, which drew `position`.
    fn step_back(&mut self, step: usize, position: usize) {
        let (word, bit) = self.bit(position);
        if self.bits[word] & bit != 0
            && let Some(place) = self.places.remove(&(position as u64))
        {
            self.found[place] = step;
        }
        // Positions that are found by now were not removed from the heap.
        while self.largest.peek().is_some_and(|largest| *largest >= step) {
            self.largest.pop();
            if let Some(place) = self.places.remove(&(step as u64)) {
                self.add(position, place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permutation::inside_out;

    #[test]
    fn windows_are_parts_of_the_shuffle() {
        for (len, block, window, seed) in
            [(1, 1, 1, 0), (1000, 64, 130, 3), (1000, 1000, 1000, 4), (777, 10, 1, 5), (97, 200, 50, 6)]
        {
            let mut expected = Vec::new();
            inside_out(&mut Generator::new(seed), &mut expected, len, |index| index);
            let mut windows = Windows::of(Generator::new(seed), len, block, window);
            let found: Vec<usize> = (0..len).map(|position| windows.at(position).unwrap()).collect();
            assert_eq!(found, expected, "{len}, {block}, {window}");
            assert_eq!(windows.at(len / 2).unwrap(), expected[len / 2]);
        }
    }
}
