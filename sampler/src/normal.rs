//! PyTorch's normally distributed random numbers.

use crate::allocation::zeros;
use crate::fused::fused;
use crate::{Generator, SamplerError, cephes};

/// PyTorch draws normal numbers in groups of this many if at least that many are requested.
const GROUP: usize = 16;

impl Generator {
    /// Draws `len` normal numbers of mean 0 and standard deviation 1: `torch.randn(len)`.
    ///
    /// Fewer than 16 numbers are drawn one at a time, in pairs; the second of a pair may be stored in the generator
    /// for the next such call. From 16 on they are drawn in groups, as by PyTorch on x86-64 with AVX2: on other
    /// machines PyTorch's own numbers differ from these by up to 1e-6, while these are the same on every machine.
    ///
    /// # Errors
    ///
    /// If memory is exhausted.
    ///
    /// # Source
    ///
    /// Box and Muller, "A Note on the Generation of Random Normal Deviates" (1958).
    pub fn randn(&mut self, len: usize) -> Result<Vec<f32>, SamplerError> {
        let mut out = zeros(len, "random numbers")?;
        self.fill_randn(&mut out);
        Ok(out)
    }

    /// Fills a slice as [`randn`](Self::randn) does.
    pub fn fill_randn(&mut self, out: &mut [f32]) {
        self.fill_scaled(out, 0.0, 1.0);
    }

    /// Draws `len` normal numbers of the given mean and standard deviation: `torch.empty(len).normal_(mean,
    /// deviation)`.
    ///
    /// # Errors
    ///
    /// If the deviation is negative, or one of the two is not finite in `f32`; if memory is exhausted.
    pub fn normal(&mut self, len: usize, mean: f64, deviation: f64) -> Result<Vec<f32>, SamplerError> {
        let mut out = zeros(len, "random numbers")?;
        self.fill_normal(&mut out, mean, deviation)?;
        Ok(out)
    }

    /// Fills a slice as [`normal`](Self::normal) does.
    ///
    /// # Errors
    ///
    /// As [`normal`](Self::normal); the slice and the generator are then unchanged.
    pub(crate) fn fill_normal(
        &mut self,
        out: &mut [f32],
        mean: f64,
        deviation: f64,
    ) -> Result<(), SamplerError> {
        if !((mean as f32).is_finite() && (deviation as f32).is_finite() && deviation >= 0.0) {
            let need = "give a finite mean and a finite deviation of 0 or more";
            return Err(SamplerError::Distribution { distribution: "normal", a: mean, b: deviation, need });
        }
        self.fill_scaled(out, mean, deviation);
        Ok(())
    }

    fn fill_scaled(&mut self, out: &mut [f32], mean: f64, deviation: f64) {
        if out.len() < GROUP {
            out.fill_with(|| self.next_normal().mul_add(deviation, mean) as f32);
            return;
        }
        self.fill_rand(out);
        let (mean, deviation) = (mean as f32, deviation as f32);
        transform(out, mean, deviation);
        if !out.len().is_multiple_of(GROUP) {
            let start = out.len() - GROUP;
            let last = &mut out[start..];
            self.fill_rand(last);
            transform(last, mean, deviation);
        }
    }

    /// Draws one normal number in double precision; the second of its pair is stored for the next call.
    fn next_normal(&mut self) -> f64 {
        if let Some(spare) = self.spare_normal.take() {
            return spare;
        }
        let turn = self.next_f64();
        let radius = (-2.0 * (-self.next_f64()).ln_1p()).sqrt();
        let angle = 2.0 * std::f64::consts::PI * turn;
        self.spare_normal = Some(radius * angle.sin());
        radius * angle.cos()
    }
}

/// Transforms all whole groups of uniform numbers into normal ones, in place.
fn transform(numbers: &mut [f32], mean: f32, deviation: f32) {
    fused(
        #[inline(always)]
        || {
            for group in numbers.as_chunks_mut::<GROUP>().0 {
                let (first, second) = group.split_at_mut(GROUP / 2);
                for (a, b) in first.iter_mut().zip(second) {
                    let radius = (-2.0 * cephes::ln(1.0 - *a)).sqrt();
                    let (sin, cos) = cephes::sin_cos(std::f32::consts::TAU * *b);
                    *a = (radius * cos).mul_add(deviation, mean);
                    *b = (radius * sin).mul_add(deviation, mean);
                }
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_those_of_a_normal_distribution() {
        for len in [15, 100_000] {
            let mut generator = Generator::new(9);
            let numbers: Vec<f32> =
                (0..100_000 / len).flat_map(|_| generator.normal(len, 3.0, 2.0).unwrap()).collect();
            let count = numbers.len() as f64;
            let mean = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / count;
            let variance = numbers.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / count;
            assert!((mean - 3.0).abs() < 0.03 && (variance.sqrt() - 2.0).abs() < 0.03, "{mean} {variance}");
        }
    }

    #[test]
    fn bad_parameters_are_errors() {
        let mut generator = Generator::new(0);
        for (mean, deviation) in [(0.0, -1.0), (f64::NAN, 1.0), (0.0, f64::INFINITY)] {
            assert!(generator.normal(2, mean, deviation).is_err());
        }
    }
}
