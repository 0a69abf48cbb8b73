//! Generated pictures, used without CIFAR-10: random, of the same shape, with classes that can be learned.

use sampler::{Generator, SamplerError};

use super::model::ConvNet;
use super::pictures::{PICTURE_BYTES, Pictures, SIDE};

/// Number of single-coloured fields along each side of a picture.
const FIELDS: usize = 4;
/// Minimum weight of a picture's own class pattern, out of 256.
const LEAST_SHARE: i64 = 112;
/// Amplitude of the noise.
const NOISE: i64 = 64;

/// One pattern of random coloured fields per class.
pub struct Patterns {
    /// Colour values, indexed by class, colour, row and column of the field.
    fields: Vec<i64>,
}

impl Patterns {
    /// Draws the patterns.
    ///
    /// # Errors
    /// None known.
    pub fn draw(generator: &mut Generator) -> Result<Self, SamplerError> {
        Ok(Self { fields: generator.randint(ConvNet::CLASSES * 3 * FIELDS * FIELDS, 0, 256)? })
    }

    /// Generates pictures. Each mixes the pattern of its class with another class's pattern, and adds noise; the
    /// other pattern may have the larger weight.
    ///
    /// # Errors
    /// More pictures than there is memory for.
    pub fn pictures(&self, generator: &mut Generator, len: usize) -> Result<Pictures, SamplerError> {
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
    use super::*;

    #[test]
    fn more_than_memory_is_an_error() {
        let mut generator = Generator::new(0);
        let patterns = Patterns::draw(&mut generator).unwrap();
        assert!(patterns.pictures(&mut generator, usize::MAX / 2).is_err());
    }
}
