//! Cross-entropy of logits and target classes: loss and gradient in one operation.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, bail};

use super::cast::cast;
use super::{width, working_dtype};
use crate::dense::{dense, with_numbers};
use crate::lock::lock;
use crate::real::{Real, ln, max, sum};
use crate::simd::vectorized;
use crate::{Error, Result, SavedBytes, cuda, tape};

const NAME: &str = "cross_entropy";

/// The mean over all rows of `ln(sum(exp(row))) - row[target]`: the loss of a classifier, with a fused gradient.
///
/// Rows whose target is `ignore_index` are excluded from the mean, and get a gradient of 0 (PyTorch's default is
/// `Some(-100)`). If all rows are excluded the loss is NaN, as in PyTorch.
///
/// # Shapes
/// Logits `(.., classes)` of rank 1 or more; targets, of u8, u32 or i64, the same without the last dimension.
/// The loss has no dimensions.
///
/// # Cost
/// On a CPU the gradient is computed along with the loss if the logits are part of a graph: two passes, and memory
/// for one more copy of the logits until backward. On other devices the targets are checked on the host, which waits
/// for the device.
///
/// # Errors
/// Shapes that do not fit; a target that is not a class; logits not of f16, bf16, f32 or f64, targets not of an
/// integer dtype.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let logits = Var::new(&[[0f32, 0.], [5., 5.]], &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// let loss = ops::cross_entropy(&logits, &targets, None)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 2f32.ln());
/// let grads = loss.backward()?;
/// let gradient = grads.get(&logits).map(|g| g.to_vec2::<f32>()).transpose()?;
/// assert_eq!(gradient, Some(vec![vec![0.25, -0.25], vec![-0.25, 0.25]]));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    ignore_index: Option<i64>,
) -> candle_core::Result<Tensor> {
    let dtype = working_dtype(NAME, logits.dtype())?;
    let size = logits.dims().last().copied().unwrap_or_default();
    let targets = classes(NAME, logits, size, targets, ignore_index)?;
    // Gradients of f16 would be too small before a scaled loss makes them larger.
    if cuda::knows(logits) && logits.dtype() != DType::F16 {
        return on_cuda(logits, &targets);
    }
    let wide = cast(logits, dtype)?;
    let loss = if logits.device().is_cpu() {
        let wide = wide.contiguous()?;
        let (saved, kept) = (wide.track_op().then(Mutex::default), SavedBytes::default());
        let numbers = saved.as_ref().map_or(0, |_| wide.elem_count() * wide.dtype().size_in_bytes());
        let bytes = numbers + size_of_val(&targets[..]);
        let loss = tape::apply_op1(&wide, CrossEntropy { targets, saved, kept: kept.clone() })?;
        kept.by(&loss, bytes);
        loss
    } else {
        composed(&wide, &targets)?
    };
    cast(&loss, logits.dtype())
}

/// Each row's class, or `None` for ignored rows.
pub(super) type Targets = Vec<Option<usize>>;

/// Validates the targets of an input, one for each row of all dimensions but the last.
pub(super) fn classes(
    operation: &'static str,
    input: &Tensor,
    classes: usize,
    targets: &Tensor,
    ignore_index: Option<i64>,
) -> candle_core::Result<Targets> {
    let Some((_, rows)) = input.dims().split_last() else {
        return Err(
            Error::ShapeMismatch { operation, tensor: "logits", expected: vec![1], got: vec![] }.into()
        );
    };
    if targets.dims() != rows {
        let (expected, got) = (rows.to_vec(), targets.dims().to_vec());
        return Err(Error::ShapeMismatch { operation, tensor: "targets", expected, got }.into());
    }
    if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
        return Err(Error::TargetsNotInteger { operation, got: targets.dtype() }.into());
    }
    let class = |(row, target)| match usize::try_from(target) {
        _ if Some(target) == ignore_index => Ok(None),
        Ok(class) if class < classes => Ok(Some(class)),
        _ => Err(Error::TargetOutOfRange { row, target, classes, ignore_index }),
    };
    let targets = targets.flatten_all()?.to_dtype(DType::I64)?.to_vec1::<i64>()?;
    Ok(targets.into_iter().enumerate().map(class).collect::<Result<_>>()?)
}

fn on_cuda(logits: &Tensor, targets: &Targets) -> candle_core::Result<Tensor> {
    let rows = logits.detach().force_contiguous()?.reshape((targets.len(), width(logits.dims())))?;
    let count = targets.iter().flatten().count() as f64;
    let losses = cuda::cross_entropy(&rows, &numbers(targets, logits.device())?, 0.0, 1.0 / count)?;
    let loss = losses.sum_all()?.affine(1.0 / count, 0.0)?.to_dtype(logits.dtype())?;
    let (gradient, kept) = (rows.reshape(logits.shape())?, SavedBytes::default());
    let bytes = gradient.elem_count() * gradient.dtype().size_in_bytes();
    let held = kept.clone();
    let loss = tape::explicit_op1(NAME, [logits], loss, move |_, of_loss| {
        // As long as the gradient for a loss's of 1, which this owns.
        let _ = &held;
        Ok([Some(gradient.broadcast_mul(&of_loss.detach())?)])
    })?;
    kept.by(&loss, bytes);
    Ok(loss)
}

/// The targets for the kernel: no class for ignored rows.
pub(super) fn numbers(targets: &Targets, device: &Device) -> candle_core::Result<Tensor> {
    let numbers: Vec<u32> =
        targets.iter().map(|target| target.map_or(u32::MAX, |class| class as u32)).collect();
    Tensor::new(numbers, device)
}

fn composed(logits: &Tensor, targets: &Targets) -> candle_core::Result<Tensor> {
    let counted: Vec<u32> = (0..).zip(targets).filter(|(_, t)| t.is_some()).map(|(row, _)| row).collect();
    let classes: Vec<u32> = targets.iter().flatten().map(|&class| class as u32).collect();
    let count = counted.len();
    if count == 0 {
        // No device selects 0 rows. Gradients of 0, as on a CPU.
        return (logits * logits.zeros_like()?)?.sum_all()?.affine(1.0, f64::NAN);
    }
    let rows = logits.reshape(((), width(logits.dims())))?;
    let rows = rows.index_select(&Tensor::from_vec(counted, count, logits.device())?, 0)?;
    let picked =
        super::log_softmax(&rows)?.gather(&Tensor::from_vec(classes, (count, 1), logits.device())?, 1)?;
    picked.sum_all()?.affine(-1.0 / count as f64, 0.0)
}

struct CrossEntropy {
    targets: Targets,
    /// Gradient of the logits for a loss gradient of 1; `Some` if backward may follow.
    saved: Option<Mutex<Option<CpuStorage>>>,
    #[expect(dead_code, reason = "releases its count when dropped")]
    kept: SavedBytes,
}

impl CrossEntropy {
    /// Returns the loss; replaces the logits in `gradient` by their gradient.
    fn loss<T: Real>(&self, logits: &[T], width: usize, gradient: Option<&mut [T]>) -> T {
        vectorized!({ self.rows(logits, width, gradient) })
    }

    #[inline(always)]
    fn rows<T: Real>(&self, logits: &[T], width: usize, mut gradient: Option<&mut [T]>) -> T {
        let count = self.targets.iter().flatten().count() as f64;
        let share = T::from_f64(1.0 / count);
        let mut loss = 0.0;
        for (index, (row, target)) in logits.chunks_exact(width).zip(&self.targets).enumerate() {
            let out = gradient.as_deref_mut().and_then(|g| g.get_mut(index * width..(index + 1) * width));
            let &Some(class) = target else {
                out.into_iter().flatten().for_each(|g| *g = T::zero());
                continue;
            };
            let top = max(row);
            let total = match out {
                None => sum(row, |x| (x - top).exp_nonpositive()),
                Some(out) => {
                    out.iter_mut().for_each(|x| *x = (*x - top).exp_nonpositive());
                    let total = sum(out, |x| x);
                    let scale = share / total;
                    out.iter_mut().for_each(|x| *x *= scale);
                    out[class] -= share;
                    total
                }
            };
            loss += (ln(total) - (row[class] - top)).to_f64();
        }
        T::from_f64(loss / count)
    }

    fn forward<T: Real>(&self, logits: &[T], width: usize) -> CpuStorage {
        let Some(saved) = &self.saved else {
            return T::to_cpu_storage_owned(vec![self.loss(logits, width, None)]);
        };
        let mut gradient = logits.to_vec();
        let loss = self.loss(logits, width, Some(&mut gradient));
        *lock(saved) = Some(T::to_cpu_storage_owned(gradient));
        T::to_cpu_storage_owned(vec![loss])
    }

    fn backward<T: Real>(&self, logits: &Tensor, of_loss: T) -> candle_core::Result<Tensor> {
        let saved = self.saved.as_ref().and_then(|saved| lock(saved).take());
        let classes = width(logits.dims());
        let mut gradient = match saved {
            Some(saved) => T::cpu_storage_data(saved)?,
            // A second backward: the first one moved the saved gradient out.
            None => with_numbers(logits, |logits| {
                let mut gradient = logits.to_vec();
                self.loss(logits, classes, Some(&mut gradient));
                Ok(gradient)
            })?,
        };
        if of_loss != T::one() {
            gradient.iter_mut().for_each(|g| *g *= of_loss);
        }
        Tensor::from_vec(gradient, logits.shape(), logits.device())
    }
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let width = width(layout.dims());
        let loss = match storage {
            CpuStorage::F32(_) => self.forward::<f32>(dense(storage, layout)?, width),
            CpuStorage::F64(_) => self.forward::<f64>(dense(storage, layout)?, width),
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((loss, Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, gradient: &Tensor) -> candle_core::Result<Option<Tensor>> {
        match logits.dtype() {
            DType::F32 => self.backward::<f32>(logits, gradient.to_scalar()?).map(Some),
            _ => self.backward::<f64>(logits, gradient.to_scalar()?).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// The fused operation equals the composed one, gradient included.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        let logits = Var::from_tensor(&Tensor::randn(0f64, 3., (3, 2, 5), &Device::Cpu)?)?;
        let targets = Tensor::new(&[[0i64, 4], [-100, 2], [1, -100]], &Device::Cpu)?;
        let fused = cross_entropy(&logits, &targets, Some(-100))?;
        let composed = composed(&logits, &classes(NAME, &logits, 5, &targets, Some(-100))?)?;
        assert_agree([fused, composed], |loss| Ok(loss.clone()), &[&logits], 1e-13, "cross-entropy")
    }
}
