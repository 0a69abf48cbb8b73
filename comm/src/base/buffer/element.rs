//! Arithmetic on the elements of tensors.

use candle_core::DType;

use crate::ReduceOp;
use crate::algorithm::schedule::Combine;

/// An element type that is reduced. Elements of f16 and bf16 are widened to f32 before, and only copied in their own type.
pub(crate) trait Element: bytemuck::Pod + Send + Sync {
    fn sum(self, right: Self) -> Self;
    fn product(self, right: Self) -> Self;
    fn min(self, right: Self) -> Self;
    fn max(self, right: Self) -> Self;
    fn divide(self, by: usize) -> Self;
}

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn sum(self, right: Self) -> Self { self + right }
            #[inline(always)]
            fn product(self, right: Self) -> Self { self * right }
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

float!(f64, f32);
integer!(u8, u32, i64);

/// Calls an expression for elements of the type that `dtype` names. Does nothing for a dtype that is never reduced.
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

/// Reduces `theirs` into `mine`, element by element, with the operands in the order given by `how`, or copies it. Both are whole
/// elements, as many; `mine` is aligned.
pub(crate) fn combine_bytes(dtype: DType, op: ReduceOp, how: Combine, mine: &mut [u8], theirs: &[u8]) {
    let theirs_first = match how {
        Combine::Replace => return mine.copy_from_slice(theirs),
        Combine::TheirsFirst => true,
        Combine::MineFirst => false,
    };
    of_dtype!(dtype, T => {
        let mine = bytemuck::cast_slice_mut::<u8, T>(mine);
        match op {
            ReduceOp::Sum | ReduceOp::Avg => fold(theirs_first, mine, theirs, T::sum),
            ReduceOp::Product => fold(theirs_first, mine, theirs, T::product),
            ReduceOp::Min => fold(theirs_first, mine, theirs, Element::min),
            ReduceOp::Max => fold(theirs_first, mine, theirs, Element::max),
        }
    });
}

/// Replaces every NaN by the one of the standard library. Which sign and payload a sum that is NaN gets depends on the order
/// of the operands, which compilers may exchange, and on the processor. f16 and bf16 are reduced as f32.
pub(crate) fn unify_nans(dtype: DType, bytes: &mut [u8]) {
    macro_rules! unify {
        ($type:ty) => {{
            let elements = bytemuck::cast_slice_mut::<u8, $type>(bytes);
            // Without branches, so that it is vectorised: there hardly ever is one.
            if elements.iter().fold(false, |any, element| any | element.is_nan()) {
                elements
                    .iter_mut()
                    .filter(|element| element.is_nan())
                    .for_each(|element| *element = <$type>::NAN);
            }
        }};
    }
    match dtype {
        DType::F32 => unify!(f32),
        DType::F64 => unify!(f64),
        _ => {}
    }
}

/// Divides every element by `by`.
pub(crate) fn divide_bytes(dtype: DType, by: usize, bytes: &mut [u8]) {
    of_dtype!(dtype, T => {
        bytemuck::cast_slice_mut::<u8, T>(bytes).iter_mut().for_each(|element| *element = element.divide(by));
    });
}

#[inline(always)]
fn fold<T: Element>(theirs_first: bool, mine: &mut [T], theirs: &[u8], reduce: impl Fn(T, T) -> T) {
    let theirs = theirs.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned::<T>);
    let pairs = mine.iter_mut().zip(theirs);
    match theirs_first {
        true => pairs.for_each(|(mine, theirs)| *mine = reduce(theirs, *mine)),
        false => pairs.for_each(|(mine, theirs)| *mine = reduce(*mine, theirs)),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Tensor};

    use super::*;
    use crate::{Communicator, Local, Operation};

    #[test]
    fn nan_wins_on_either_side() {
        for (left, right) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            assert!(Element::min(left, right).is_nan() && Element::max(left, right).is_nan());
        }
        assert_eq!((Element::min(1.0, 2.0), Element::max(1.0, 2.0)), (1.0, 2.0));
    }

    #[test]
    fn results_that_are_nan_have_the_same_bits_on_all_ranks() {
        let bits = |comm: &dyn Communicator, dtype: DType, op: ReduceOp| -> candle_core::Result<Vec<u64>> {
            let nan = [0xffc0_0000, 0x7fc0_0000, 0xffc0_0007].map(f32::from_bits)[comm.rank() % 3];
            let tensor = Tensor::new(&[nan, 1.0, -nan], &Device::Cpu)?.to_dtype(dtype)?;
            comm.run(Operation::AllReduce { tensor: tensor.clone(), op })?;
            match dtype {
                DType::F64 => Ok(tensor.to_vec1::<f64>()?.into_iter().map(f64::to_bits).collect()),
                _ => {
                    let wide = tensor.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                    Ok(wide.into_iter().map(|value| value.to_bits().into()).collect())
                }
            }
        };
        for ranks in 2..=7 {
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product] {
                for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
                    let all = Local::run(ranks, |comm| Ok(bits(comm, dtype, op)?)).unwrap();
                    assert!(
                        all.iter().all(|bits| *bits == all[0]),
                        "{ranks} ranks, {op:?}, {dtype:?}: {all:x?}"
                    );
                }
            }
        }
    }

    #[test]
    fn integers_wrap() {
        assert_eq!((250u8.sum(10), 2u32.product(u32::MAX), i64::MAX.sum(1)), (4, u32::MAX - 1, i64::MIN));
    }

    #[test]
    fn operands_keep_their_order() {
        let larger_of_zeros = |how| {
            let mut mine = -0.0f32;
            let (bytes, theirs) = (bytemuck::bytes_of_mut(&mut mine), bytemuck::bytes_of(&0.0f32));
            combine_bytes(DType::F32, ReduceOp::Max, how, bytes, theirs);
            mine.to_bits()
        };
        assert_eq!(larger_of_zeros(Combine::TheirsFirst), (-0.0f32).to_bits());
        assert_eq!(larger_of_zeros(Combine::MineFirst), 0.0f32.to_bits());
    }
}
