//! The values that the 4 bits of a number and the 8 bits of a scale stand for.

use std::sync::LazyLock;

/// The values of NF4, ascending.
///
/// Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E.
pub(super) const NF4: [f32; 16] = [
    -1.0, -0.696_192_8, -0.525_073_05, -0.394_917_5, -0.284_441_38, -0.184_773_43, -0.091_050_036, 0.0,
    0.079_580_3, 0.160_930_2, 0.246_112_3, 0.337_915_24, 0.440_709_83, 0.562_617, 0.722_956_84, 1.0,
];

/// The values halfway between neighbours of [`NF4`].
static BOUNDS: LazyLock<[f32; 15]> =
    LazyLock::new(|| std::array::from_fn(|at| (NF4[at] + NF4[at + 1]) * 0.5));

/// The index of the nearest value of [`NF4`], the lower one of two.
pub(super) fn nearest_nf4(x: f32) -> u8 {
    BOUNDS.iter().map(|&bound| u8::from(x > bound)).sum()
}

/// The values of a scale's byte, ascending: 0, 1, and for each of seven powers of ten as many positive and negative numbers as
/// there are bits left for the fraction, evenly spaced.
///
/// Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2016), section 2.1.
pub(super) static SCALES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    const POWERS: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut values = vec![0.0, 1.0];
    for (exponent, power) in POWERS.into_iter().enumerate() {
        let count: u16 = 1 << exponent;
        let step = (1.0 - 0.1) / f32::from(count);
        // From both ends, and rounded once, as PyTorch's `linspace`.
        let bound = |at: u16| match at <= count / 2 {
            true => step.mul_add(f32::from(at), 0.1),
            false => (-step).mul_add(f32::from(count - at), 1.0),
        };
        for at in 0..count {
            let value = (bound(at) + bound(at + 1)) / 2.0 * power;
            values.extend([value, -value]);
        }
    }
    values.sort_by(f32::total_cmp);
    std::array::from_fn(|at| values[at])
});

/// Steps of [`NEAREST`] between -1 and 1.
const STEPS: usize = u16::MAX as usize;

/// For each of evenly spaced numbers from -1 to 1, the index of the nearest of [`SCALES`].
static NEAREST: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut nearest = 0;
    let of_step = |step: usize| {
        let x = step as f64 / (STEPS as f64 / 2.0) - 1.0;
        let middle = |at: usize| (f64::from(SCALES[at]) + f64::from(SCALES[at + 1])) / 2.0;
        while nearest < 255 && x > middle(nearest) {
            nearest += 1;
        }
        nearest as u8
    };
    (0..=STEPS).map(of_step).collect()
});

/// The index of about the nearest of [`SCALES`]: the number is first rounded to one of [`STEPS`], as bitsandbytes does.
pub(super) fn nearest_scale(x: f32) -> u8 {
    let step = (x + 1.0) * (STEPS as f32 / 2.0) + 0.5;
    NEAREST[(step as usize).min(STEPS)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_distinct_and_their_own_nearest() {
        assert!(NF4.is_sorted_by(|a, b| a < b) && SCALES.is_sorted_by(|a, b| a < b));
        for (at, &value) in NF4.iter().enumerate() {
            assert_eq!(usize::from(nearest_nf4(value)), at);
        }
        // Those near 0 are closer together than the steps.
        for (at, &value) in SCALES.iter().enumerate().filter(|(_, value)| value.abs() > 1e-3) {
            assert_eq!(usize::from(nearest_scale(value)), at, "{value}");
        }
        assert_eq!([nearest_nf4(f32::NAN), nearest_scale(f32::NAN)], [0, nearest_scale(-1.0)]);
    }
}
