//! Logarithm, sine and cosine in single precision, with the bits of PyTorch's vectorised normal numbers.
//!
//! PyTorch transforms normal numbers in groups of 16 with the polynomials of the Cephes library, whose
//! multiplications and additions its compiler fuses. The same steps, fused at the same places, yield the same bits.
//! Here they are fused on every processor, so the numbers do not depend on the machine.
//!
//! # Source
//!
//! S. Moshier, Cephes Mathematical Library, `logf` and `sinf` (coefficients and range reduction).

const LN: [f32; 9] = [
    7.0376836e-2, -1.151461e-1, 1.16769984e-1, -1.2420141e-1, 1.4249323e-1, -1.6668057e-1, 2.0000714e-1,
    -2.4999994e-1, 3.333333e-1,
];
/// ln 2 in two parts, the first with few bits.
const LN_2: [f32; 2] = [6.933594e-1, -2.1219444e-4];
/// pi / 4 in three parts, the first two with few bits.
const QUARTER_PI: [f32; 3] = [7.8515625e-1, 2.4187565e-4, 3.774895e-8];
const SIN: [f32; 3] = [-1.9515296e-4, 8.332161e-3, -1.6666655e-1];
const COS: [f32; 3] = [2.4433157e-5, -1.3887316e-3, 4.1666646e-2];

/// Horner's rule, each step fused.
#[inline(always)]
fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    let mut sum = coefficients[0];
    for next in &coefficients[1..] {
        sum = sum.mul_add(x, *next);
    }
    sum
}

/// The natural logarithm of a normal positive number.
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as f32 - 126.0;
    let mut fraction = f32::from_bits((bits & 0x007f_ffff) | 0x3f00_0000);
    // Without a branch, so that a loop over numbers has vectors.
    let is_small = fraction < std::f32::consts::FRAC_1_SQRT_2;
    exponent -= if is_small { 1.0 } else { 0.0 };
    fraction += if is_small { fraction } else { 0.0 };
    let x = fraction - 1.0;
    let square = x * x;
    let tail = (polynomial(&LN, x) * x).mul_add(square, exponent * LN_2[1]);
    exponent.mul_add(LN_2[0], x + square.mul_add(-0.5, tail))
}

/// Sine and cosine of a small non-negative angle.
#[inline(always)]
pub(crate) fn sin_cos(angle: f32) -> (f32, f32) {
    let octant = ((angle * (4.0 / std::f32::consts::PI)) as i32).wrapping_add(1) & !1;
    let mut x = angle;
    for part in QUARTER_PI {
        x = (octant as f32).mul_add(-part, x);
    }
    let square = x * x;
    let cos = (polynomial(&COS, square) * square).mul_add(square, -(square * 0.5)) + 1.0;
    let sin = (polynomial(&SIN, square) * square).mul_add(x, x);
    let (sin, cos) = if octant & 2 == 0 { (sin, cos) } else { (cos, sin) };
    let sin = if octant & 4 == 0 { sin } else { -sin };
    (sin, if octant.wrapping_add(2) & 4 == 0 { cos } else { -cos })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_functions_they_stand_for() {
        for i in 1..=4096u32 {
            let x = i as f32 / 4096.0;
            assert!((ln(x) - x.ln()).abs() <= 1e-6 * x.ln().abs().max(1e-2), "ln {x}");
            let angle = std::f32::consts::TAU * (x - 1.0 / 4096.0);
            let (sin, cos) = sin_cos(angle);
            assert!((sin - angle.sin()).abs() < 3e-7 && (cos - angle.cos()).abs() < 3e-7, "angle {angle}");
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }
}
