//! Generated pictures, used without CIFAR-10: random, of the same shape, with classes that can be learned.

use experiment::error::Result;
use models::tutorials::convnet::ConvNet;
use sampler::{Generator, SamplerError};

use super::pictures::{PICTURE_BYTES, Pictures, SIDE};

/// Number of single-coloured fields along each side of a picture.
const FIELDS: usize = 4;
/// Minimum weight of a picture's own class pattern, out of 256.
const LEAST_SHARE: i64 = 112;
/// Amplitude of the noise.
const NOISE: i64 = 64;

/// One pattern of random coloured fields per class.
pub(super) struct Patterns {
    /// Colour values, indexed by class, colour, row and column of the field.
    fields: Vec<i64>,
}

impl Patterns {
    pub(super) fn draw(generator: &mut Generator) -> Result<Self> {
        Ok(Self { fields: generator.randint(ConvNet::CLASSES * 3 * FIELDS * FIELDS, 0, 256)? })
    }

    /// Generates pictures. Each mixes the pattern of its class with another class's pattern, and adds noise; the
    /// other pattern may have the larger weight.
    pub(super) fn pictures(&self, generator: &mut Generator, len: usize) -> Result<Pictures> {
        let classes = ConvNet::CLASSES as i64;
        let labels = generator.randint(len, 0, classes)?;
        let others = generator.randint(len, 0, classes)?;
        let shares = generator.randint(len, LEAST_SHARE, 257)?;
        let mut bytes = Vec::new();
        let no_memory = |_| SamplerError::OutOfMemory { what: "pictures", len };
        bytes.try_reserve_exact(len.saturating_mul(PICTURE_BYTES)).map_err(no_memory)?;
        for ((&label, &other), &share) in labels.iter().zip(&others).zip(&shares) {
            for (at, noise) in generator.randint(PICTURE_BYTES, -NOISE, NOISE + 1)?.into_iter().enumerate() {
                let mixed = self.at(label, at) * share + self.at(other, at) * (256 - share);
                bytes.push((mixed / 256 + noise).clamp(0, 255) as u8);
            }
        }
        Ok(Pictures { bytes, labels: labels.into_iter().map(|label| label as u8).collect() })
    }

    /// Returns the value of a class's pattern at a byte of a picture.
    fn at(&self, class: i64, byte: usize) -> i64 {
        const FIELD: usize = SIDE / FIELDS;
        let (colour, row, column) = (byte / (SIDE * SIDE), byte / SIDE % SIDE, byte % SIDE);
        let field = (colour * FIELDS + row / FIELD) * FIELDS + column / FIELD;
        self.fields[class as usize * 3 * FIELDS * FIELDS + field]
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Golden {
        pictures: Vec<Sets>,
    }

    #[derive(Deserialize)]
    struct Sets {
        seed: u64,
        samples: usize,
        test_samples: usize,
        sums: [u64; 2],
        labels: [Vec<u8>; 2],
    }

    #[test]
    fn the_pictures_are_pytorchs() {
        let golden: Golden =
            serde_json::from_str(include_str!("../../../tests/fixtures/cifar10.json")).unwrap();
        for sets in golden.pictures {
            let mut generator = Generator::new(sets.seed);
            let patterns = Patterns::draw(&mut generator).unwrap();
            for (set, len) in [sets.samples, sets.test_samples].into_iter().enumerate() {
                let pictures = patterns.pictures(&mut generator, len).unwrap();
                // Weighted as in the fixture's script.
                let weights = (0..8191).map(|weight| weight + 1).cycle();
                let sum: u64 = pictures.bytes.iter().zip(weights).map(|(b, w)| u64::from(*b) * w).sum();
                assert_eq!(
                    (sum, &pictures.labels),
                    (sets.sums[set], &sets.labels[set]),
                    "seed {}",
                    sets.seed
                );
            }
        }
    }

    #[test]
    fn more_than_memory_is_an_error() {
        let mut generator = Generator::new(0);
        let patterns = Patterns::draw(&mut generator).unwrap();
        assert!(patterns.pictures(&mut generator, usize::MAX / 2).is_err());
    }
}
