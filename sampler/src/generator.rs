//! PyTorch's CPU generator: uniform reals and integers.

use rand_mt::Mt;

use crate::SamplerError;
use crate::allocation::{reserved, zeros};
use crate::fused::fused;

/// For ranges of at least this size, PyTorch draws an integer from 64 random bits instead of 32.
const WIDE_RANGE: u64 = 1 << 28;

/// PyTorch's CPU random number generator, to the bit: the same seed and the same calls give the same numbers.
///
/// A clone continues from the same state, independently.
///
/// # Cost
///
/// 2.5 KB of state. A `u32` takes a few nanoseconds.
///
/// # Source
///
/// Matsumoto and Nishimura, "Mersenne Twister" (1998), seeded with `init_genrand`; the conversion of its bits to
/// numbers follows PyTorch 2.15.
///
/// ```
/// use sampler::Generator;
///
/// # fn main() -> Result<(), sampler::SamplerError> {
/// let mut generator = Generator::new(42); // torch.manual_seed(42)
/// assert_eq!(generator.rand(2)?, [0.88226926, 0.91500396]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Generator {
    twister: Mt,
    seed: u64,
    /// The second number of the last pair of normal numbers, if only the first was used.
    pub(crate) spare_normal: Option<f64>,
}

impl Generator {
    /// Creates a generator with the given seed; only its low 32 bits are used, as in PyTorch.
    pub fn new(seed: u64) -> Self {
        Self { twister: Mt::new(seed as u32), seed, spare_normal: None }
    }

    /// Reseeds the generator: `torch.manual_seed`.
    pub fn manual_seed(&mut self, seed: u64) {
        *self = Self::new(seed);
    }

    /// The seed that this generator started from, all 64 bits.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Draws the next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        self.twister.next_u32()
    }

    /// Draws the next 64 random bits: the high half first.
    pub fn next_u64(&mut self) -> u64 {
        let high = u64::from(self.next_u32());
        (high << 32) | u64::from(self.next_u32())
    }

    /// Draws a real number from 0 to 1 (exclusive), from 24 random bits.
    pub fn next_f32(&mut self) -> f32 {
        const BITS: u32 = 24;
        (self.next_u32() & ((1 << BITS) - 1)) as f32 / (1u32 << BITS) as f32
    }

    /// Draws a real number from 0 to 1 (exclusive), from 53 random bits.
    pub(crate) fn next_f64(&mut self) -> f64 {
        const BITS: u32 = 53;
        (self.next_u64() & ((1 << BITS) - 1)) as f64 / (1u64 << BITS) as f64
    }

    /// Draws `len` real numbers from 0 to 1 (exclusive): `torch.rand(len)`.
    ///
    /// # Errors
    ///
    /// If memory is exhausted.
    pub fn rand(&mut self, len: usize) -> Result<Vec<f32>, SamplerError> {
        let mut out = zeros(len, "random numbers")?;
        self.fill_rand(&mut out);
        Ok(out)
    }

    /// Fills a slice as [`rand`](Self::rand) does.
    pub fn fill_rand(&mut self, out: &mut [f32]) {
        out.fill_with(|| self.next_f32());
    }

    /// Draws `len` real numbers from `low` to `high`: `torch.empty(len).uniform_(low, high)`.
    ///
    /// # Errors
    ///
    /// If `low` exceeds `high`, or one of them or their distance is not finite in `f32`; if memory is exhausted.
    pub fn uniform(&mut self, len: usize, low: f64, high: f64) -> Result<Vec<f32>, SamplerError> {
        let mut out = zeros(len, "random numbers")?;
        self.fill_uniform(&mut out, low, high)?;
        Ok(out)
    }

    /// Fills a slice as [`uniform`](Self::uniform) does.
    ///
    /// # Errors
    ///
    /// As [`uniform`](Self::uniform); the slice and the generator are then unchanged.
    pub(crate) fn fill_uniform(&mut self, out: &mut [f32], low: f64, high: f64) -> Result<(), SamplerError> {
        let (from, to) = (low as f32, high as f32);
        let width = to - from;
        if !(from.is_finite() && to.is_finite() && width.is_finite() && low <= high) {
            let need = "give bounds in ascending order that are finite in f32, and so is their distance";
            return Err(SamplerError::Distribution { distribution: "uniform", a: low, b: high, need });
        }
        self.fill_rand(out);
        // A fused multiply-add, as PyTorch's compiler makes it.
        fused(
            #[inline(always)]
            || out.iter_mut().for_each(|x| *x = x.mul_add(width, from)),
        );
        Ok(())
    }

    /// Draws `len` integers from `low` to `high` (exclusive): `torch.randint(low, high, (len,))`.
    ///
    /// # Errors
    ///
    /// If `high` is not above `low`; if memory is exhausted.
    pub fn randint(&mut self, len: usize, low: i64, high: i64) -> Result<Vec<i64>, SamplerError> {
        if high <= low {
            return Err(SamplerError::EmptyRange { low, high });
        }
        let mut out = reserved(len, "random integers")?;
        let range = high.wrapping_sub(low) as u64;
        for _ in 0..len {
            let bits = if range >= WIDE_RANGE { self.next_u64() } else { u64::from(self.next_u32()) };
            out.push(low.wrapping_add((bits % range) as i64));
        }
        Ok(out)
    }

    /// Draws a non-negative 63-bit integer: `torch.empty((), dtype=torch.int64).random_()`.
    pub(crate) fn next_i63(&mut self) -> u64 {
        self.next_u64() & (i64::MAX as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_high_half_of_a_seed_does_not_count() {
        let low = Generator::new(5).rand(4).unwrap();
        assert_eq!(Generator::new((7 << 32) + 5).rand(4).unwrap(), low);
        assert_eq!(Generator::new((7 << 32) + 5).seed(), (7 << 32) + 5);
    }

    #[test]
    fn seeding_anew_forgets_the_spare_normal_number() {
        let mut generator = Generator::new(1);
        generator.randn(1).unwrap();
        generator.manual_seed(1);
        assert_eq!(generator, Generator::new(1));
    }

    #[test]
    fn a_clone_goes_on_from_the_same_place() {
        let mut generator = Generator::new(3);
        generator.randn(700).unwrap();
        generator.randn(1).unwrap();
        let mut clone = generator.clone();
        assert_eq!(clone.randn(9).unwrap(), generator.randn(9).unwrap());
    }

    #[test]
    fn bad_bounds_are_errors() {
        let mut generator = Generator::new(0);
        for (low, high) in [(1.0, 0.0), (f64::NAN, 1.0), (0.0, f64::INFINITY), (0.0, 1e39), (-3e38, 3e38)] {
            assert!(generator.uniform(3, low, high).is_err(), "{low} {high}");
        }
        assert!(generator.randint(3, 5, 5).is_err());
        assert_eq!(generator, Generator::new(0));
        assert_eq!(generator.randint(3, i64::MIN, i64::MAX).unwrap().len(), 3);
    }

    #[test]
    fn more_than_memory_is_an_error() {
        let mut generator = Generator::new(0);
        assert!(matches!(generator.rand(usize::MAX), Err(SamplerError::OutOfMemory { .. })));
        assert!(matches!(generator.randn(usize::MAX), Err(SamplerError::OutOfMemory { .. })));
        assert!(matches!(generator.randperm(usize::MAX), Err(SamplerError::OutOfMemory { .. })));
        assert!(matches!(generator.randint(usize::MAX, 0, 2), Err(SamplerError::OutOfMemory { .. })));
    }
}
