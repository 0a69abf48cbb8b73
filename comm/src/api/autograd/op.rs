//! Nodes of candle's autograd graph that communicate.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, InplaceOp1, Layout, MetalStorage, Shape,
    Storage, Tensor,
};

use crate::base::lock;
use crate::engine::overlap::Span;
use crate::{Communicator, Error, Result};

/// Makes `output` the differentiable result of `x`. It was computed from `x` outside the graph, and is used nowhere
/// else.
pub(super) fn differentiable(
    name: &'static str,
    x: &Tensor,
    output: Tensor,
    comm: &Arc<dyn Communicator>,
    backward: impl Fn(&Tensor, &dyn Communicator) -> Result<Tensor> + Send + Sync + 'static,
) -> Result<Tensor> {
    let comm = comm.clone();
    custom(name, &[x], output, move |gradient| Ok(vec![Some(backward(gradient, &*comm)?)]))
}

/// Makes `output` the differentiable result of `inputs`, one to three of them. Strategies build their own layers with
/// it, whose forward and backward passes communicate. `backward` takes the gradient of the output and returns that of
/// each input, `None` where an input needs none.
///
/// `output` must have been computed outside the graph (from detached tensors), and is consumed: if it is the whole of a
/// storage, the elements are moved into the result, and any remaining clone or view of it fails when used.
///
/// # Cost
/// No copy on the CPU if `output` is contiguous, the whole of its storage, and shares that with no input; otherwise a
/// copy of it. In backward, a copy of each variable's gradient.
///
/// # Errors
/// No input or more than three; an output on another device than the inputs.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let (a, b) = (Var::new(2f32, &Device::Cpu)?, Var::new(5f32, &Device::Cpu)?);
/// let (a_value, b_value) = (a.as_detached_tensor(), b.as_detached_tensor());
/// let product = (&a_value * &b_value)?;
/// let product = comm::autograd::custom("product", &[&a, &b], product, move |gradient| {
///     Ok(vec![Some((gradient * &b_value)?), Some((gradient * &a_value)?)])
/// })?;
/// assert_eq!(product.backward()?.get(&a).map(|gradient| gradient.to_scalar::<f32>()).transpose()?, Some(5.0));
/// # Ok::<(), comm::Error>(())
/// ```
pub fn custom(
    name: &'static str,
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let variables: Vec<bool> = inputs.iter().map(|input| input.is_variable()).collect();
    custom_with_new_gradients(name, inputs, output, move |gradient| {
        let mut gradients = backward(gradient)?;
        // The gradient of a variable may be changed in place, and `backward` may return a tensor that it keeps.
        for (gradient, _) in gradients.iter_mut().zip(&variables).filter(|(_, is_variable)| **is_variable) {
            *gradient = gradient.take().map(|gradient| gradient.force_contiguous()).transpose()?;
        }
        Ok(gradients)
    })
}

/// Does the same as [`custom`], for a `backward` that keeps no clone and no view of the gradients that it returns: those of
/// variables are not copied.
///
/// # Errors
/// Those of [`custom`].
pub fn custom_with_new_gradients(
    name: &'static str,
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let output = whole(output, inputs)?;
    let node = Custom { name, output: Mutex::new(Some(output)), backward: Box::new(backward) };
    Ok(match inputs {
        [a] => ops::tape::apply_op1(a, node)?,
        [a, b] => ops::tape::apply_op2(a, b, node)?,
        [a, b, c] => ops::tape::apply_op3(a, b, c, node)?,
        _ => {
            let got = format!("{} inputs", inputs.len());
            return Err(Error::invalid("a custom operation", got, "give one to three"));
        }
    })
}

/// Returns `output` as the whole of a storage that it shares with no input: candle keeps the inputs' storages locked
/// meanwhile.
fn whole(output: Tensor, inputs: &[&Tensor]) -> Result<Tensor> {
    if output.elem_count() == 0 {
        return Ok(Tensor::zeros(output.dims(), output.dtype(), output.device())?);
    }
    let span = Span::of(&output);
    let is_input = inputs.iter().any(|input| Span::of(input).shares_storage(&span));
    // On a GPU the storage is copied from its beginning, and elements behind the result do no harm.
    let is_all = elements(&output).map_or(span.elements.start == 0, |all| span.elements == (0..all));
    let is_whole = output.is_contiguous() && is_all;
    Ok(if is_whole && !is_input { output } else { output.detach().force_contiguous()? })
}

/// Returns the number of elements of the whole storage, if it is on the CPU.
fn elements(tensor: &Tensor) -> Option<usize> {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return None };
    Some(match storage {
        CpuStorage::U8(data) => data.len(),
        CpuStorage::U32(data) => data.len(),
        CpuStorage::I16(data) => data.len(),
        CpuStorage::I32(data) => data.len(),
        CpuStorage::I64(data) => data.len(),
        CpuStorage::BF16(data) => data.len(),
        CpuStorage::F16(data) => data.len(),
        CpuStorage::F32(data) => data.len(),
        CpuStorage::F64(data) => data.len(),
        CpuStorage::F8E4M3(data) => data.len(),
        CpuStorage::F6E2M3(data) | CpuStorage::F6E3M2(data) => data.len(),
        CpuStorage::F4(data) | CpuStorage::F8E8M0(data) => data.len(),
    })
}

type CustomBackward = dyn Fn(&Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync;

struct Custom {
    name: &'static str,
    output: Mutex<Option<Tensor>>,
    backward: Box<CustomBackward>,
}

impl Custom {
    fn output(&self) -> candle_core::Result<Tensor> {
        let output = lock(&self.output).take();
        Ok(output.ok_or_else(|| Error::system(self.name, "its result was taken before"))?)
    }

    fn on_cpu(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        let output = self.output()?;
        let shape = output.shape().clone();
        Ok((into_storage(output)?, shape))
    }

    fn on_cuda(&self) -> candle_core::Result<(CudaStorage, Shape)> {
        let output = self.output()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => Ok((storage.try_clone(layout)?, layout.shape().clone())),
            _ => Err(Error::system(self.name, "its result is on another device").into()),
        }
    }

    fn on_metal(&self) -> candle_core::Result<(MetalStorage, Shape)> {
        let output = self.output()?;
        let (storage, layout) = output.storage_and_layout();
        match &*storage {
            Storage::Metal(storage) => Ok((storage.try_clone(layout)?, layout.shape().clone())),
            _ => Err(Error::system(self.name, "its result is on another device").into()),
        }
    }

    fn gradients<const N: usize>(&self, grad: &Tensor) -> candle_core::Result<[Option<Tensor>; N]> {
        let gradients = (self.backward)(grad)?;
        let got = gradients.len();
        let wrong = |_| {
            Error::invalid(self.name, format!("{got} gradients"), format!("give {N}, one for each input"))
        };
        Ok(gradients.try_into().map_err(wrong)?)
    }
}

/// Implements one of candle's traits for [`Custom`], given its name, the inputs, and the gradients' type and value. The
/// `_` of an input is the pattern for what both passes ignore of it.
macro_rules! impl_custom_op {
    ($op:ident($($input:ident $ignored:tt),+) -> $gradients:ty { $value:expr }) => {
        impl $op for Custom {
            fn name(&self) -> &'static str {
                self.name
            }

            fn cpu_fwd(
                &self,
                $($ignored: &CpuStorage, $ignored: &Layout),+
            ) -> candle_core::Result<(CpuStorage, Shape)> {
                self.on_cpu()
            }

            fn cuda_fwd(
                &self,
                $($ignored: &CudaStorage, $ignored: &Layout),+
            ) -> candle_core::Result<(CudaStorage, Shape)> {
                self.on_cuda()
            }

            fn metal_fwd(
                &self,
                $($ignored: &MetalStorage, $ignored: &Layout),+
            ) -> candle_core::Result<(MetalStorage, Shape)> {
                self.on_metal()
            }

            fn bwd(
                &self,
                $($ignored: &Tensor,)+
                _: &Tensor,
                grad: &Tensor,
            ) -> candle_core::Result<$gradients> {
                let [$($input),+] = self.gradients(grad)?;
                Ok($value)
            }
        }
    };
}

impl_custom_op!(CustomOp1(a _) -> Option<Tensor> { a });
impl_custom_op!(CustomOp2(a _, b _) -> (Option<Tensor>, Option<Tensor>) { (a, b) });
impl_custom_op!(CustomOp3(a _, b _, c _) -> (Option<Tensor>, Option<Tensor>, Option<Tensor>) { (a, b, c) });

/// Takes the elements of a tensor that is the whole of its storage and used nowhere else, without a copy.
fn into_storage(tensor: Tensor) -> candle_core::Result<CpuStorage> {
    if tensor.elem_count() == 0 {
        let (storage, _) = tensor.storage_and_layout();
        return match &*storage {
            Storage::Cpu(storage) => Ok(storage.clone()),
            _ => Err(Error::invalid("a tensor", "one that is not on the CPU", "move it there").into()),
        };
    }
    let take = Take(RefCell::new(None));
    tensor.inplace_op1(&take)?;
    take.0.into_inner().ok_or_else(|| Error::system("a tensor's storage", "it is gone").into())
}

struct Take(RefCell<Option<CpuStorage>>);

impl InplaceOp1 for Take {
    fn name(&self) -> &'static str {
        "take"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        // The tensor is not used again, so its storage may be shorter than its shape says.
        *self.0.borrow_mut() = Some(std::mem::replace(storage, CpuStorage::U8(Vec::new())));
        Ok(())
    }
}
