//! Coverage of a data set: how many samples the ranks got, and how many more than one rank got.

use std::fmt;

use experiment::error::Result;
use sampler::SamplerError;

/// Marks a sample that several ranks got; no rank has so high a number.
const SHARED: u32 = u32::MAX;

/// Which rank got each sample.
#[derive(Debug)]
pub(super) struct Coverage {
    /// For each sample: 0 for none, the rank plus 1, or [`SHARED`].
    owners: Vec<u32>,
    indices: usize,
}

impl Coverage {
    pub(super) fn new(len: usize) -> Result<Self> {
        let mut owners = Vec::new();
        let no_memory = |_| SamplerError::OutOfMemory { what: "the data set", len };
        owners.try_reserve_exact(len).map_err(no_memory)?;
        owners.resize(len, 0);
        Ok(Self { owners, indices: 0 })
    }

    /// Resets all counts.
    pub(super) fn clear(&mut self) {
        self.owners.fill(0);
        self.indices = 0;
    }

    /// Counts an index that a rank got.
    pub(super) fn add(&mut self, rank: usize, index: usize) {
        let (owner, rank) = (&mut self.owners[index], rank as u32 + 1);
        *owner = if *owner == 0 || *owner == rank { rank } else { SHARED };
        self.indices += 1;
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let samples = self.owners.iter().filter(|owner| **owner != 0).count();
        write!(f, "{} indices, {samples} of {} samples, ", self.indices, self.owners.len())?;
        match self.owners.iter().filter(|owner| **owner == SHARED).count() {
            0 => write!(f, "none on more than one rank"),
            shared => write!(f, "{shared} on more than one rank"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_counted() {
        let mut coverage = Coverage::new(6).unwrap();
        let mut add = |rank, indices: &[usize]| {
            indices.iter().for_each(|index| coverage.add(rank, *index));
            coverage.to_string()
        };
        add(0, &[0, 2, 2]);
        assert_eq!(add(1, &[1, 3]), "5 indices, 4 of 6 samples, none on more than one rank");
        add(2, &[4, 5, 0]);
        assert_eq!(add(1, &[5]), "9 indices, 6 of 6 samples, 2 on more than one rank");
        coverage.clear();
        assert_eq!(coverage.to_string(), "0 indices, 0 of 6 samples, none on more than one rank");
        assert!(Coverage::new(usize::MAX).is_err());
    }
}
