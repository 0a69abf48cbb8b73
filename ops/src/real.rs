//! `Real`, the float types that fused operations compute with, and sums and maxima of rows.

use std::ops::Neg;

use candle_core::FloatDType;

/// Number of partial sums, which vector instructions compute in parallel; fixed, so that sums have the same bits on
/// every machine.
const LANES: usize = 16;

/// f32 or f64.
pub trait Real: FloatDType + Neg<Output = Self> {
    /// Less than every number.
    const NEG_INFINITY: Self;

    /// `exp` of a number that is 0 or less.
    fn exp_nonpositive(self) -> Self;

    /// The square root.
    fn root(self) -> Self;

    /// Complementary error function of a number that is 0 or more.
    fn erfc(self) -> Self;
}

impl Real for f64 {
    const NEG_INFINITY: Self = f64::NEG_INFINITY;

    fn exp_nonpositive(self) -> Self {
        self.exp()
    }

    fn root(self) -> Self {
        self.sqrt()
    }

    fn erfc(self) -> Self {
        candle_core::cpu::erf::erfc_f64(self)
    }
}

impl Real for f32 {
    const NEG_INFINITY: Self = f32::NEG_INFINITY;

    /// Within two units in the last place; 0 where the result would be below the normal numbers.
    ///
    /// Only arithmetic, without a branch: the compiler vectorizes it, and every machine yields the same bits.
    ///
    /// Source: S. Moshier, Cephes Mathematical Library, `expf` (coefficients and range reduction).
    #[inline(always)]
    fn exp_nonpositive(self) -> Self {
        const LOWEST: f32 = -87.33654;
        /// Adding it to a small number leaves that number, rounded to an integer, in the low bits.
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
        /// ln 2 in two parts, the first with few bits.
        const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
        const POLYNOMIAL: [f32; 6] =
            [1.987_569_2e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5];

        let rounded = self * std::f32::consts::LOG2_E + ROUND;
        let whole = rounded - ROUND;
        let x = self - whole * LN_2[0] - whole * LN_2[1];
        let mut sum = POLYNOMIAL[0];
        for coefficient in &POLYNOMIAL[1..] {
            sum = sum * x + coefficient;
        }
        let fraction = sum * x * x + x + 1.0;
        let power_of_two = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
        if self < LOWEST { 0.0 } else { fraction * power_of_two }
    }

    #[inline(always)]
    fn root(self) -> Self {
        self.sqrt()
    }

    /// Relative error below 1e-6, also for small results. Only arithmetic, without a branch.
    ///
    /// Source: Press et al., "Numerical Recipes", section 6.2 (a Chebyshev fit of the logarithm).
    #[inline(always)]
    fn erfc(self) -> Self {
        const FIT: [f32; 10] = [
            0.170_872_77, -0.822_152_2, 1.488_515_9, -1.135_204, 0.278_868_08, -0.186_288_06, 0.096_784_18,
            0.374_091_96, 1.000_023_7, -1.265_512_2,
        ];
        let t = 1.0 / (1.0 + 0.5 * self);
        let fit = FIT[1..].iter().fold(FIT[0], |sum, coefficient| sum * t + coefficient);
        t * (fit - self * self).exp_nonpositive()
    }
}

/// The sum of `f` over a row.
#[inline(always)]
pub fn sum<T: Real>(row: &[T], f: impl Fn(T) -> T) -> T {
    let mut lanes = [T::zero(); LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f(x);
    }
    sum_lanes(lanes)
}

/// The sum of `f` over the pairs of elements of two rows.
#[inline(always)]
pub(crate) fn sum_pairs<T: Real>(row: &[T], other: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut lanes = [T::zero(); LANES];
    let ((chunks, rest), (others, other_rest)) = (row.as_chunks::<LANES>(), other.as_chunks::<LANES>());
    for (chunk, other) in chunks.iter().zip(others) {
        for ((lane, &x), &y) in lanes.iter_mut().zip(chunk).zip(other) {
            *lane += f(x, y);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(rest).zip(other_rest) {
        *lane += f(x, y);
    }
    sum_lanes(lanes)
}

fn sum_lanes<T: Real>(mut lanes: [T; LANES]) -> T {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            let other = lanes[lane + half];
            lanes[lane] += other;
        }
        half /= 2;
    }
    lanes[0]
}

/// The maximum of a row, ignoring NaN; minus infinity for a row without numbers.
#[inline(always)]
pub(crate) fn max<T: Real>(row: &[T]) -> T {
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut lanes = [T::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).copied().fold(T::NEG_INFINITY, larger)
}

/// Natural logarithm, computed in f64: its last bits, which depend on the platform, do not reach an f32.
pub(crate) fn ln<T: Real>(x: T) -> T {
    T::from_f64(x.to_f64().ln())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponentials_are_right_to_the_last_places() {
        let mut worst = 0f64;
        for i in 0..1_000_000 {
            let x = -(i as f32) * 8.7e-5;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(x.exp_nonpositive()) - exact).abs() / exact);
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "{worst}");
    }

    #[test]
    fn exponentials_at_the_ends() {
        assert_eq!(0f32.exp_nonpositive(), 1.0);
        assert_eq!((-1e4f32).exp_nonpositive(), 0.0);
        assert_eq!(f32::NEG_INFINITY.exp_nonpositive(), 0.0);
        assert!(f32::NAN.exp_nonpositive().is_nan());
        assert!((-87.33f32).exp_nonpositive() > 0.0);
    }

    #[test]
    fn sums_and_maxima_of_all_lengths() {
        for len in 0..70 {
            let row: Vec<f64> = (0..len).map(|i| f64::from((i * 7) % 13)).collect();
            assert_eq!(sum(&row, |x| x), row.iter().sum::<f64>());
            assert_eq!(sum_pairs(&row, &row, |x, y| x * y), row.iter().map(|x| x * x).sum::<f64>());
            assert_eq!(max(&row), row.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
