//! Arithmetic on the elements of tensors.

use candle_core::DType;
use half::{bf16, f16};

use crate::ReduceOp;
use crate::algorithm::schedule::Combine;

/// An element type that can be reduced. Elements of f16 and bf16 are widened to f32 before, and only copied in
/// their own type.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    fn sum(self, right: Self) -> Self;
    fn product(self, right: Self) -> Self;
    fn min(self, right: Self) -> Self;
    fn max(self, right: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

/// Returns `nan` in place of any NaN. Which sign and payload a NaN gets depends on the operands' order, which compilers
/// may exchange, and on the processor; without it, ranks that add the same numbers would have different bits.
#[inline(always)]
#[allow(clippy::eq_op, reason = "only a NaN differs from itself")]
fn canonical<T: PartialEq + Copy>(result: T, nan: T) -> T {
    if result != result { nan } else { result }
}

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn sum(self, right: Self) -> Self { canonical(self + right, Self::NAN) }
            #[inline(always)]
            fn product(self, right: Self) -> Self { canonical(self * right, Self::NAN) }
            // Not the standard library's `min`: NaN must win, as it does in PyTorch.
            #[inline(always)]
            fn min(self, right: Self) -> Self { if self < right || self.is_nan() { self } else { right } }
            #[inline(always)]
            fn max(self, right: Self) -> Self { if self > right || self.is_nan() { self } else { right } }
            #[inline(always)]
            fn divide(self, by: usize) -> Self { self / by as $type }
        }
    )*};
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn sum(self, right: Self) -> Self { self.wrapping_add(right) }
            #[inline(always)]
            fn product(self, right: Self) -> Self { self.wrapping_mul(right) }
            #[inline(always)]
            fn min(self, right: Self) -> Self { Ord::min(self, right) }
            #[inline(always)]
            fn max(self, right: Self) -> Self { Ord::max(self, right) }
            // Averages of integers are refused when an operation is submitted.
            fn divide(self, _by: usize) -> Self { self }
        }
    )*};
}

macro_rules! narrow_float {
    ($($type:ty),*) => {$(
        impl Element for $type {
            fn sum(self, right: Self) -> Self { Self::from_f32(Element::sum(self.to_f32(), right.to_f32())) }
            fn product(self, right: Self) -> Self { Self::from_f32(Element::product(self.to_f32(), right.to_f32())) }
            fn min(self, right: Self) -> Self { Self::from_f32(Element::min(self.to_f32(), right.to_f32())) }
            fn max(self, right: Self) -> Self { Self::from_f32(Element::max(self.to_f32(), right.to_f32())) }
            fn divide(self, by: usize) -> Self { Self::from_f32(self.to_f32() / by as f32) }
        }
    )*};
}

float!(f64, f32);
integer!(u8, u32, i64);
narrow_float!(f16, bf16);

/// Reduces `theirs`, whose bytes need not be aligned, into `mine`, element by element, with the operands in the order
/// given by `combine`.
pub(crate) fn combine<T: Element>(op: ReduceOp, combine: Combine, mine: &mut [T], theirs: &[u8]) {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => fold(combine, mine, theirs, T::sum),
        ReduceOp::Product => fold(combine, mine, theirs, T::product),
        ReduceOp::Min => fold(combine, mine, theirs, T::min),
        ReduceOp::Max => fold(combine, mine, theirs, T::max),
    }
}

/// Calls an expression for elements of the type that `dtype` names. Does nothing for a dtype that is never sent.
macro_rules! of_dtype {
    ($dtype:expr, $type:ident => $call:expr) => {
        match $dtype {
            DType::F64 => {
                type $type = f64;
                $call
            }
            DType::F32 => {
                type $type = f32;
                $call
            }
            DType::F16 => {
                type $type = f16;
                $call
            }
            DType::BF16 => {
                type $type = bf16;
                $call
            }
            DType::U8 => {
                type $type = u8;
                $call
            }
            DType::U32 => {
                type $type = u32;
                $call
            }
            DType::I64 => {
                type $type = i64;
                $call
            }
            _ => {}
        }
    };
}

/// The same for bytes: `mine` and `theirs` are whole elements, and `mine` is aligned.
pub(crate) fn combine_bytes(dtype: DType, op: ReduceOp, how: Combine, mine: &mut [u8], theirs: &[u8]) {
    of_dtype!(dtype, T => combine::<T>(op, how, bytemuck::cast_slice_mut(mine), theirs));
}

/// Divides every element by `by`.
pub(crate) fn divide_bytes(dtype: DType, by: usize, bytes: &mut [u8]) {
    of_dtype!(dtype, T => {
        bytemuck::cast_slice_mut::<u8, T>(bytes).iter_mut().for_each(|element| *element = element.divide(by));
    });
}

#[inline(always)]
fn fold<T: Element>(combine: Combine, mine: &mut [T], theirs: &[u8], reduce: impl Fn(T, T) -> T) {
    let theirs = theirs.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
    let pairs = mine.iter_mut().zip(theirs);
    match combine {
        Combine::Replace => pairs.for_each(|(mine, theirs)| *mine = theirs),
        Combine::TheirsFirst => pairs.for_each(|(mine, theirs)| *mine = reduce(theirs, *mine)),
        Combine::MineFirst => pairs.for_each(|(mine, theirs)| *mine = reduce(*mine, theirs)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_wins_on_either_side() {
        for (left, right) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            assert!(Element::min(left, right).is_nan() && Element::max(left, right).is_nan());
        }
        assert_eq!((Element::min(1.0, 2.0), Element::max(1.0, 2.0)), (1.0, 2.0));
    }

    /// Reduces in both orders, and returns the bits of both results.
    fn both_orders<T: Element>(op: ReduceOp, left: &[T], right: &[T]) -> [Vec<u8>; 2] {
        let (mut first, mut second) = (left.to_vec(), right.to_vec());
        combine(op, Combine::MineFirst, &mut first, bytemuck::cast_slice(right));
        combine(op, Combine::MineFirst, &mut second, bytemuck::cast_slice(left));
        [first, second].map(|result| bytemuck::cast_slice(&result).to_vec())
    }

    #[test]
    fn a_sum_that_is_nan_has_the_same_bits_whatever_made_it() {
        let left = [f32::NAN, -f32::NAN, f32::from_bits(0x7fc0_0007), f32::INFINITY, 1.0];
        let right = [-f32::NAN, 1.0, f32::from_bits(0xffc0_0005), f32::NEG_INFINITY, f32::NAN];
        let narrow = |all: &[f32]| all.iter().map(|value| bf16::from_f32(*value)).collect::<Vec<_>>();
        let wide = |all: &[f32]| all.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
        for op in [ReduceOp::Sum, ReduceOp::Product] {
            // Infinity times minus infinity is no NaN.
            let count = if op == ReduceOp::Sum { 5 } else { 3 };
            let (left, right) = (&left[..count], &right[..count]);
            let nans = |bytes: Vec<u8>| vec![bytes; count].concat();
            assert_eq!(both_orders(op, left, right), [(); 2].map(|()| nans(f32::NAN.to_ne_bytes().into())));
            let wide = both_orders(op, &wide(left), &wide(right));
            assert_eq!(wide, [(); 2].map(|()| nans(f64::NAN.to_ne_bytes().into())));
            let narrow = both_orders(op, &narrow(left), &narrow(right));
            assert_eq!(narrow, [(); 2].map(|()| nans(bf16::NAN.to_ne_bytes().into())));
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!((250u8.sum(10), 2u32.product(u32::MAX), i64::MAX.sum(1)), (4, u32::MAX - 1, i64::MIN));
    }

    #[test]
    fn operands_keep_their_order() {
        let mut mine = [-0.0f32];
        combine(ReduceOp::Max, Combine::TheirsFirst, &mut mine, bytemuck::bytes_of(&0.0f32));
        assert_eq!(mine[0].to_bits(), (-0.0f32).to_bits());
        let mut mine = [-0.0f32];
        combine(ReduceOp::Max, Combine::MineFirst, &mut mine, bytemuck::bytes_of(&0.0f32));
        assert_eq!(mine[0].to_bits(), 0.0f32.to_bits());
    }
}
