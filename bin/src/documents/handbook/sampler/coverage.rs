//! Coverage of a data set: how many samples the ranks got, and how many more than one rank got.

use std::fmt;

use sampler::SamplerError;

/// Marks a sample that several ranks got; no rank has so high a number.
const SHARED: u32 = u32::MAX;

/// Which rank got each sample of a data set: shows whether a sampler gives every sample to exactly one rank.
#[derive(Debug, Clone)]
pub(super) struct Coverage {
    /// For each sample: 0 for none, the rank plus 1, or [`SHARED`].
    owners: Vec<u32>,
    indices: usize,
}

impl Coverage {
    /// Creates the counts of a data set of `len` samples, of which no rank has got any; takes 4 bytes for each.
    ///
    /// # Errors
    /// More samples than there is memory for.
    pub(super) fn new(len: usize) -> Result<Self, SamplerError> {
        let mut owners = Vec::new();
        owners.try_reserve_exact(len).map_err(|_| SamplerError::OutOfMemory { what: "the data set", len })?;
        owners.resize(len, 0);
        Ok(Self { owners, indices: 0 })
    }

    /// Resets all counts.
    pub(super) fn clear(&mut self) {
        self.owners.fill(0);
        self.indices = 0;
    }

    /// Counts an index that a rank got. One beyond the data set counts as an index without a sample.
    pub(super) fn add(&mut self, rank: usize, index: usize) {
        self.indices += 1;
        let rank = u32::try_from(rank).unwrap_or(SHARED).saturating_add(1);
        if let Some(owner) = self.owners.get_mut(index) {
            *owner = if *owner == 0 || *owner == rank { rank } else { SHARED };
        }
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
    use sampler::{DistributedSampler, DistributedSamplerConfig};

    use super::*;

    #[test]
    fn a_padded_data_set_overlaps() {
        let mut coverage = Coverage::new(10).unwrap();
        for rank in 0..4 {
            let config =
                DistributedSamplerConfig { dataset_len: 10, num_replicas: 4, rank, ..Default::default() };
            let sampler = DistributedSampler::new(config).unwrap();
            sampler.iter().unwrap().for_each(|index| coverage.add(rank, index));
        }
        // 10 samples are padded to 12, which 4 ranks divide.
        assert_eq!(coverage.to_string(), "12 indices, 10 of 10 samples, 2 on more than one rank");
    }

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
