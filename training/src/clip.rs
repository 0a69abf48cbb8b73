//! Gradient clipping by global norm.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{D, DType, Device, Storage, Tensor, Var};
use ops::kernels::{self, BLOCK, blocks_of_work, dense, sum, vectorized};

use crate::{Error, Result};

/// Number of elements in each run that is summed in f32.
const RUN_LEN: usize = 1024;

/// Returns the 2-norm of the gradients of all these parameters together; parameters without a gradient count as 0.
///
/// Squares are summed in f64, parameter by parameter (on a CPU those of f32 in f32 over runs of 1,024 elements, and the
/// runs in f64). Where a model is divided over ranks, this is the norm of this
/// rank's part; `strategy` combines it into the norm of the whole, by which [`clip_by_norm`] clips.
///
/// # Cost
/// One pass over the gradients.
///
/// # Errors
/// candle's.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let weight = Var::new(&[3f32, 4.], &Device::Cpu)?;
/// let grads = (weight.as_tensor().sqr()?.sum_all()? * 0.5)?.backward()?;
/// assert_eq!(training::grad_norm(&grads, &[weight])?, 5.0);
/// # Ok::<(), training::Error>(())
/// ```
pub fn grad_norm(grads: &GradStore, vars: &[Var]) -> Result<f64> {
    let mut seen = HashSet::new();
    let found = vars.iter().filter_map(|var| grads.get(var).filter(|_| seen.insert(var.id())));
    let (on_cuda, others): (Vec<&Tensor>, Vec<&Tensor>) = found.partition(|grad| kernels::knows(grad));
    let on_cuda = on_cuda.into_iter().map(Tensor::contiguous).collect::<candle_core::Result<Vec<_>>>()?;
    let mut total: f64 = kernels::squares(&on_cuda)?.into_iter().sum();
    for grad in others {
        total += squares(grad)?;
    }
    Ok(total.sqrt())
}

/// Multiplies the gradients of these parameters by `factor`. The store gets new tensors; other references to the old
/// ones do not change.
pub(crate) fn scale_grads(grads: &mut GradStore, vars: &[Var], factor: f64) -> Result<()> {
    let mut seen = HashSet::new();
    for var in vars {
        if let Some(grad) = grads.get(var).filter(|_| seen.insert(var.id())) {
            let scaled = grad.affine(factor, 0.0)?;
            grads.insert(var, scaled);
        }
    }
    Ok(())
}

/// Scales the gradients of these parameters so that their joint norm is at most `max_norm`; returns the norm before
/// scaling.
///
/// As PyTorch's `clip_grad_norm_` with `error_if_nonfinite=True`: all are multiplied by `max_norm / (norm + 1e-6)`
/// where that is below 1.
///
/// # Where it may not be used
/// This is the norm over this process's parameters. Where ranks have different parts of a model (shards, parts of
/// layers, stages), each would clip by a different norm, without an error: the result would differ from one
/// process's, and parameters that several ranks hold, such as the norms between divided layers, would drift apart. In
/// that case call the model's own method, which takes the norm over all ranks and counts each parameter once:
/// `Fsdp::clip_grad_norm`, `TensorParallel::clip_grad_norm`, `Pipeline::clip_grad_norm`. Where every rank has the
/// whole model and the same gradients (`Ddp`), this is equivalent to `Ddp::clip_grad_norm`.
///
/// # Cost
/// One pass over the gradients, and another if they are clipped.
///
/// # Errors
/// [`Error::NotFinite`] names the first parameter whose gradient holds a NaN or an infinity; nothing is changed.
/// [`Error::InvalidConfig`] for a `max_norm` that is negative or NaN.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let weight = Var::new(&[3f64, 4.], &Device::Cpu)?;
/// let mut grads = (weight.as_tensor().sqr()?.sum_all()? * 0.5)?.backward()?;
/// assert_eq!(training::clip_grad_norm(&mut grads, &[weight.clone()], 1.0)?, 5.0);
/// assert!((training::grad_norm(&grads, &[weight])? - 1.0).abs() < 1e-6);
/// # Ok::<(), training::Error>(())
/// ```
pub fn clip_grad_norm(grads: &mut GradStore, vars: &[Var], max_norm: f64) -> Result<f64> {
    check_max_norm(max_norm)?;
    let norm = grad_norm(grads, vars)?;
    if let (false, Some(index)) = (norm.is_finite(), first_not_finite(grads, vars)?) {
        let norm = grad_norm(grads, &vars[index..=index])?;
        return Err(Error::NotFinite { index, norm });
    }
    clip_by_norm(grads, vars, norm, max_norm)?;
    Ok(norm)
}

/// Scales the gradients of these parameters as [`clip_grad_norm`] does, for a given norm of all gradients together,
/// including those of other ranks.
///
/// # Cost
/// One pass over the gradients if they are clipped.
///
/// # Errors
/// [`Error::NormNotFinite`]; [`Error::InvalidConfig`] for a `max_norm` that is negative or NaN. Nothing is changed in
/// either case.
///
/// ```
/// use candle_core::{Device, Var};
///
/// let weight = Var::new(&[3f64], &Device::Cpu)?;
/// let mut grads = (weight.as_tensor().sqr()?.sum_all()? * 0.5)?.backward()?;
/// // Another rank has the gradient 4.
/// training::internal::clip_by_norm(&mut grads, &[weight.clone()], 5.0, 1.0)?;
/// assert!((training::grad_norm(&grads, &[weight])? - 0.6).abs() < 1e-6);
/// # Ok::<(), training::Error>(())
/// ```
pub fn clip_by_norm(grads: &mut GradStore, vars: &[Var], norm: f64, max_norm: f64) -> Result<()> {
    let factor = clip_factor(norm, max_norm)?;
    if factor < 1.0 { scale_grads(grads, vars, factor) } else { Ok(()) }
}

/// Returns the factor by which [`clip_by_norm`] multiplies gradients of this joint norm: 1 if no clipping is needed.
///
/// Passing it to [`Adam::step_scaled`](crate::Adam::step_scaled) or [`Sgd::step_scaled`](crate::Sgd::step_scaled)
/// saves a separate pass over the gradients.
///
/// # Errors
/// As [`clip_by_norm`].
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_nn::Optimizer;
/// use training::internal::clip_factor;
/// use training::{Adam, AdamConfig, grad_norm};
///
/// let weight = Var::new(&[3f64, 4.], &Device::Cpu)?;
/// let mut adam = Adam::new(vec![weight.clone()], AdamConfig::adamw())?;
/// let grads = (weight.as_tensor().sqr()?.sum_all()? * 0.5)?.backward()?;
/// let factor = clip_factor(grad_norm(&grads, &[weight])?, 1.0)?;
/// assert!((factor - 0.2).abs() < 1e-6);
/// adam.step_scaled(&grads, factor)?;
/// # Ok::<(), training::Error>(())
/// ```
pub fn clip_factor(norm: f64, max_norm: f64) -> Result<f64> {
    // PyTorch adds the same, to avoid a division by zero.
    const TINY: f64 = 1e-6;
    check_max_norm(max_norm)?;
    if !norm.is_finite() {
        return Err(Error::NormNotFinite { norm });
    }
    Ok((max_norm / (norm + TINY)).min(1.0))
}

/// Returns the index of the first of these parameters whose gradient holds a NaN or an infinity.
///
/// # Errors
/// candle's.
pub fn first_not_finite(grads: &GradStore, vars: &[Var]) -> Result<Option<usize>> {
    for (index, var) in vars.iter().enumerate() {
        if !grad_norm(grads, std::slice::from_ref(var))?.is_finite() {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

fn check_max_norm(max_norm: f64) -> Result<()> {
    if max_norm.is_nan() || max_norm < 0.0 {
        let help = "it must be a number, 0 or more";
        return Err(Error::InvalidConfig { of: "clip_grad_norm", field: "max_norm", got: max_norm, help });
    }
    Ok(())
}

/// The sum of squares, in f64.
fn squares(grad: &Tensor) -> candle_core::Result<f64> {
    if grad.device().is_cpu() && grad.is_contiguous() {
        let (storage, layout) = grad.storage_and_layout();
        if let (Storage::Cpu(storage), DType::F32) = (&*storage, grad.dtype()) {
            let numbers = dense::<f32>(storage, layout)?;
            // Each run is summed in f32 SIMD lanes, the runs in f64: fast, with a relative error near f32 rounding.
            let mut sums = vec![0f64; numbers.len().div_ceil(RUN_LEN)];
            blocks_of_work([&mut sums], BLOCK / RUN_LEN, numbers.len(), |at, [sums]| {
                vectorized!({
                    for (total, run) in sums.iter_mut().zip(numbers[at * RUN_LEN..].chunks(RUN_LEN)) {
                        *total = f64::from(sum(run, |x| x * x));
                    }
                });
            });
            let total: f64 = sums.into_iter().sum();
            if total.is_finite() && total > 1e-30 {
                return Ok(total);
            }
        }
    }
    // On the gradient's device if possible. In f64, since squares overflow or underflow in f32. Metal has no f64.
    let grad = if grad.device().is_metal() { grad.to_device(&Device::Cpu)? } else { grad.clone() };
    grad.to_dtype(DType::F64)?.flatten_all()?.sqr()?.sum(D::Minus1)?.to_scalar()
}
