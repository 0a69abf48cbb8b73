//! Digest: a hash with which ranks compare their data.

use candle_core::{CpuStorage, Device, Storage, Tensor};

use crate::Result;

/// A hash of words, text and tensors. It is the same in every build and on every machine, which the standard library's
/// hashes do not promise. Flipping one bit of a word always changes it. It detects mistakes, and does not protect
/// against forgery.
///
/// ```
/// use comm::internal::Digest;
///
/// assert_eq!(Digest::new().text("bias").word(3u8), Digest::new().text("bias").word(3u64));
/// assert_ne!(Digest::new().text("ab").text("c"), Digest::new().text("a").text("bc"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Digest(u64);

impl Default for Digest {
    /// Not a small number: a first word equal to it would make the state 0.
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    /// Returns the digest of nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one word. The step is one-to-one in the word, and mixes high bits into low ones.
    #[must_use]
    pub fn word(self, word: impl Into<u64>) -> Self {
        let state = (self.0 ^ word.into()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self(state ^ (state >> 32))
    }

    /// Adds a text and its length.
    #[must_use]
    pub fn text(self, text: &str) -> Self {
        text.bytes().fold(self, Self::word).word(text.len() as u64)
    }

    /// Adds the number of elements of a tensor and, if they are floats, the bits of all elements in row-major order.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn floats(self, tensor: &Tensor) -> Result<Self> {
        let tensor = tensor.detach().to_device(&Device::Cpu)?.contiguous()?;
        let (storage, layout) = tensor.storage_and_layout();
        let range = layout.start_offset()..layout.start_offset() + tensor.elem_count();
        let counted = self.word(tensor.elem_count() as u64);
        Ok(match &*storage {
            Storage::Cpu(CpuStorage::F64(data)) => {
                data[range].iter().map(|x| x.to_bits()).fold(counted, Self::word)
            }
            Storage::Cpu(CpuStorage::F32(data)) => {
                data[range].iter().map(|x| x.to_bits()).fold(counted, Self::word)
            }
            Storage::Cpu(CpuStorage::F16(data)) => {
                data[range].iter().map(|x| x.to_bits()).fold(counted, Self::word)
            }
            Storage::Cpu(CpuStorage::BF16(data)) => {
                data[range].iter().map(|x| x.to_bits()).fold(counted, Self::word)
            }
            _ => counted,
        })
    }

    /// Returns the 64 bits of the digest.
    pub fn value(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signs_places_and_lengths_are_told_apart() -> Result<()> {
        let words: [&[f64]; 8] =
            [&[], &[0.0], &[0.0, 0.0], &[1.0, 0.0], &[0.0, 1.0], &[-0.0, 0.0], &[0.0, -0.0], &[-0.0, -0.0]];
        let digest = |words: &&[f64]| Digest::new().floats(&Tensor::new(*words, &Device::Cpu)?);
        let digests = words.iter().map(digest).collect::<Result<Vec<_>>>()?;
        for (index, one) in digests.iter().enumerate() {
            assert!(!digests[index + 1..].contains(one), "{digests:?}");
        }
        Ok(())
    }

    #[test]
    fn a_view_counts_as_what_it_shows() -> Result<()> {
        let whole = Tensor::arange(0f32, 6.0, &Device::Cpu)?.reshape((2, 3))?;
        let of = |tensor: &Tensor| Digest::new().floats(tensor);
        let column = Tensor::new(&[1f32, 4.0], &Device::Cpu)?;
        assert_eq!(of(&whole.narrow(1, 1, 1)?)?, of(&column)?);
        Ok(())
    }
}
