//! MPI reduction operations: MPI's own, and custom ones for minima and maxima of floats, where MPI leaves open how NaN
//! and minus zero are handled.

#![allow(unsafe_code, reason = "MPI calls our functions with addresses")]

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use candle_core::DType;
use mpi::ffi;

use crate::base::buffer::element::Element;
use crate::{ReduceOp, Result};

use super::library::check;

/// Custom operations: minimum and maximum of f32, then of f64.
struct Own([ffi::MPI_Op; 4]);

// SAFETY: MPI runs with MPI_THREAD_MULTIPLE, so any thread may use its handles.
unsafe impl Send for Own {}
// SAFETY: as above.
unsafe impl Sync for Own {}

/// Returns the MPI operation for elements that are reduced in their own dtype. A mean is reduced as a sum.
pub(super) fn operation(op: ReduceOp, dtype: DType) -> Result<ffi::MPI_Op> {
    let index = match (op, dtype) {
        (ReduceOp::Min, DType::F32) => 0,
        (ReduceOp::Max, DType::F32) => 1,
        (ReduceOp::Min, DType::F64) => 2,
        (ReduceOp::Max, DType::F64) => 3,
        // SAFETY: the handles are constants.
        (ReduceOp::Sum | ReduceOp::Avg, _) => return Ok(unsafe { ffi::RSMPI_SUM }),
        // SAFETY: as above.
        (ReduceOp::Product, _) => return Ok(unsafe { ffi::RSMPI_PROD }),
        // SAFETY: as above.
        (ReduceOp::Min, _) => return Ok(unsafe { ffi::RSMPI_MIN }),
        // SAFETY: as above.
        (ReduceOp::Max, _) => return Ok(unsafe { ffi::RSMPI_MAX }),
    };
    static OWN: OnceLock<Result<Own>> = OnceLock::new();
    OWN.get_or_init(make).as_ref().map(|own| own.0[index]).map_err(Clone::clone)
}

fn make() -> Result<Own> {
    let functions: [ffi::MPI_User_function; 4] = [
        Some(fold::<f32, Smallest>),
        Some(fold::<f32, Largest>),
        Some(fold::<f64, Smallest>),
        Some(fold::<f64, Largest>),
    ];
    // SAFETY: the handle is a constant.
    let mut own = Own([unsafe { ffi::RSMPI_SUM }; 4]);
    for (made, function) in own.0.iter_mut().zip(functions) {
        // Not commutative: of 0 and -0 the second is taken, so all ranks must reduce in the same order.
        // SAFETY: the function has the signature that MPI asks for, and lives as long as the program.
        check("MPI_Op_create", unsafe { ffi::MPI_Op_create(function, 0, made) })?;
    }
    Ok(own)
}

trait Choose {
    fn choose<T: Element>(left: T, right: T) -> T;
}

struct Smallest;
struct Largest;

impl Choose for Smallest {
    fn choose<T: Element>(left: T, right: T) -> T {
        left.min(right)
    }
}

impl Choose for Largest {
    fn choose<T: Element>(left: T, right: T) -> T {
        left.max(right)
    }
}

/// # Safety
/// `left` and `right` are addresses of `len` elements each; the second may be written to.
unsafe extern "C" fn fold<T: Element, C: Choose>(
    left: *mut c_void,
    right: *mut c_void,
    len: *mut c_int,
    _: *mut ffi::MPI_Datatype,
) {
    let (left, right) = (left.cast::<T>(), right.cast::<T>());
    // SAFETY: the caller's obligation; MPI does not guarantee alignment.
    unsafe {
        for index in 0..usize::try_from(*len).unwrap_or(0) {
            let (mine, theirs) = (left.add(index).read_unaligned(), right.add(index).read_unaligned());
            right.add(index).write_unaligned(C::choose(mine, theirs));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_wins_and_of_two_zeros_the_second() {
        let (mut left, mut right, mut len) = ([1f32, f32::NAN, -0.0, 2.0], [f32::NAN, 1.0, 0.0, 3.0], 4);
        let (left, out) = (left.as_mut_ptr().cast(), right.as_mut_ptr().cast());
        // SAFETY: the arrays have four elements each.
        unsafe { fold::<f32, Largest>(left, out, &mut len, std::ptr::null_mut()) };
        assert!(right[0].is_nan() && right[1].is_nan() && right[3] == 3.0);
        assert_eq!(right[2].to_bits(), 0.0f32.to_bits());
    }
}
