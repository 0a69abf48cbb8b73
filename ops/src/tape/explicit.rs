//! Operations whose result was computed by other operations, with a backward of their own.

use std::mem::replace;
use std::sync::{Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, InplaceOp1, Layout, MetalStorage,
    Result, Shape, Storage, Tensor, bail,
};

use crate::lock::lock;
use crate::tape::{apply_op1, apply_op2, apply_op3};

/// Makes `result` depend on `x`, as the operation `name`: backward through what this returns calls `backward`, and not the
/// operations by which the result was computed, on any device. It is known to [`backward`](crate::tape::backward).
///
/// Compute the result from `x.detach()`, so that no graph of it is kept. Nobody else may use it: its memory is moved to what
/// this returns. `backward` gets the arguments and the gradient of the result, and returns those of the arguments; `None` where
/// there is none, for example because the argument is no part of a graph. It should `detach` what it computes with: nobody needs
/// a graph of a gradient.
///
/// # Cost
/// None on a CPU, one allocation on other devices; nothing is copied, if the result is contiguous.
///
/// # Errors
/// candle's.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::tape::explicit_op1;
///
/// let x = Var::new(&[2f32], &Device::Cpu)?;
/// let y = explicit_op1("cube", [&x], x.detach().powf(3.0)?, |[x], gradient| {
///     Ok([Some((gradient * x.detach().sqr()?)?.affine(3.0, 0.0)?)])
/// })?;
/// assert_eq!(y.to_vec1::<f32>()?, [8.0]);
/// assert_eq!(y.sum_all()?.backward()?.get(&x).unwrap().to_vec1::<f32>()?, [12.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn explicit_op1(
    name: &'static str,
    [x]: [&Tensor; 1],
    result: Tensor,
    backward: impl Fn([&Tensor; 1], &Tensor) -> Result<[Option<Tensor>; 1]> + Send + Sync + 'static,
) -> Result<Tensor> {
    apply_op1(x, Computed::new(name, result, backward)?)
}

/// As [`explicit_op1`], with two arguments.
///
/// # Errors
/// As [`explicit_op1`].
pub fn explicit_op2(
    name: &'static str,
    [x, y]: [&Tensor; 2],
    result: Tensor,
    backward: impl Fn([&Tensor; 2], &Tensor) -> Result<[Option<Tensor>; 2]> + Send + Sync + 'static,
) -> Result<Tensor> {
    apply_op2(x, y, Computed::new(name, result, backward)?)
}

/// As [`explicit_op1`], with three arguments.
///
/// # Errors
/// As [`explicit_op1`].
pub fn explicit_op3(
    name: &'static str,
    [x, y, z]: [&Tensor; 3],
    result: Tensor,
    backward: impl Fn([&Tensor; 3], &Tensor) -> Result<[Option<Tensor>; 3]> + Send + Sync + 'static,
) -> Result<Tensor> {
    apply_op3(x, y, z, Computed::new(name, result, backward)?)
}

/// An operation that hands out a result that exists already, once.
struct Computed<B> {
    name: &'static str,
    result: Mutex<Option<Tensor>>,
    backward: B,
}

impl<B> Computed<B> {
    fn new(name: &'static str, result: Tensor, backward: B) -> Result<Self> {
        let (start, end) = result.layout().contiguous_offsets().unwrap_or((1, 0));
        let is_whole = start == 0 && end == result.elem_count();
        let result = if is_whole { result.detach() } else { result.force_contiguous()? };
        Ok(Self { name, result: Mutex::new(Some(result)), backward })
    }

    fn take<S: Stored>(&self) -> Result<(S, Shape)> {
        let result = lock(&self.result).take();
        let Some(result) = result else { bail!("the result was taken before") };
        let taken = Taken(Mutex::new(None));
        result.inplace_op1(&taken)?;
        let storage = taken.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        match storage.and_then(S::of) {
            Some(storage) => Ok((storage, result.shape().clone())),
            None => bail!("the result is on another device than the arguments"),
        }
    }
}

/// The storage moved out of a tensor.
struct Taken(Mutex<Option<Storage>>);

/// A device's storage.
trait Stored: BackendStorage {
    fn of(storage: Storage) -> Option<Self>;
}

macro_rules! impl_stored {
    ($storage:ty, $variant:ident) => {
        impl Stored for $storage {
            fn of(storage: Storage) -> Option<Self> {
                match storage {
                    Storage::$variant(storage) => Some(storage),
                    _ => None,
                }
            }
        }
    };
}

impl_stored!(CpuStorage, Cpu);
impl_stored!(CudaStorage, Cuda);
impl_stored!(MetalStorage, Metal);

impl Taken {
    /// Moves a storage out of its tensor, which gets one element that nobody reads.
    #[allow(unsafe_code, reason = "uninitialised memory costs no operation on the device")]
    fn take<S>(&self, storage: &mut S, as_any: fn(S) -> Storage) -> Result<()>
    where
        S: BackendStorage<Device: BackendDevice<Storage = S>>,
    {
        // SAFETY: the tensor is dropped without being read.
        let nothing = unsafe { storage.device().alloc_uninit(&Shape::from(1), DType::U8)? };
        let taken = as_any(replace(storage, nothing));
        *lock(&self.0) = Some(taken);
        Ok(())
    }
}

impl InplaceOp1 for Taken {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
        self.take(storage, Storage::Cpu)
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
        self.take(storage, Storage::Cuda)
    }

    fn metal_fwd(&self, storage: &mut MetalStorage, _: &Layout) -> Result<()> {
        self.take(storage, Storage::Metal)
    }
}

/// Implements one of candle's traits, given the names of a call's arguments and of their gradients.
macro_rules! impl_custom_op {
    ($op:ident<$count:literal>($($x:ident $layout:ident $grad:ident),+) -> $gradients:ty) => {
        impl<B> $op for Computed<B>
        where
            B: Fn([&Tensor; $count], &Tensor) -> Result<[Option<Tensor>; $count]>,
        {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(&self, $(_: &CpuStorage, $layout: &Layout),+) -> Result<(CpuStorage, Shape)> {
                let _ = ($($layout),+);
                self.take()
            }

            fn cuda_fwd(&self, $(_: &CudaStorage, $layout: &Layout),+) -> Result<(CudaStorage, Shape)> {
                let _ = ($($layout),+);
                self.take()
            }

            fn metal_fwd(&self, $(_: &MetalStorage, $layout: &Layout),+) -> Result<(MetalStorage, Shape)> {
                let _ = ($($layout),+);
                self.take()
            }

            fn bwd(&self, $($x: &Tensor,)+ _: &Tensor, gradient: &Tensor) -> Result<$gradients> {
                let [$($grad),+] = (self.backward)([$($x),+], gradient)?;
                Ok(($($grad),+))
            }
        }
    };
}

impl_custom_op!(CustomOp1<1>(x l a) -> Option<Tensor>);
impl_custom_op!(CustomOp2<2>(x l a, y m b) -> (Option<Tensor>, Option<Tensor>));
impl_custom_op!(CustomOp3<3>(x l a, y m b, z n c) -> (Option<Tensor>, Option<Tensor>, Option<Tensor>));

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// The gradients of a product, marked as these: seven times what they are.
    fn seven([x, y]: [&Tensor; 2], gradient: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let of = |other: &Tensor| (gradient * other.detach())?.affine(7.0, 0.0);
        Ok([Some(of(y)?), Some(of(x)?)])
    }

    #[test]
    fn its_own_backward_is_called_by_both_passes() -> Result<()> {
        let device = Device::Cpu;
        let (x, y) = (Var::new(&[2f64, 3.0], &device)?, Var::new(&[5f64, 7.0], &device)?);
        let wide = Tensor::stack(&[(&*x * &*y)?, x.zeros_like()?], 1)?;
        // The last is a part of a tensor that is not contiguous.
        let results = [(x.detach() * y.detach())?, wide.detach().narrow(1, 0, 1)?.squeeze(1)?];
        for result in results {
            let product = explicit_op2("seven", [&x, &y], result, seven)?;
            assert_eq!(product.to_vec1::<f64>()?, [10.0, 21.0]);
            let loss = crate::tape::scalar_with_gradient(&product, Tensor::new(&[1f64, 10.0], &device)?)?;
            for grads in [crate::tape::backward(&loss)?, loss.backward()?] {
                assert_eq!(grads.get(&x).unwrap().to_vec1::<f64>()?, [35.0, 490.0]);
                assert_eq!(grads.get(&y).unwrap().to_vec1::<f64>()?, [14.0, 210.0]);
            }
        }
        assert!(!explicit_op2("seven", [&x.detach(), &y.detach()], (&*x * &*y)?, seven)?.track_op());
        Ok(())
    }
}
