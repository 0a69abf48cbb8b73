//! Output layer and loss of a language model, without materializing the logits of all rows at once.

use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Shape, Tensor, bail};

use super::cast::cast;
use super::cross_entropy::{Targets, classes};
use super::linear::column_sums;
use super::working_dtype;
use crate::blocks::{blocks, of_rows};
use crate::dense::{dense, with_numbers};
use crate::lock::lock;
use crate::product::{Accumulator, Matrix, ProductConfig, multiply, multiply_into};
use crate::real::{Real, ln, max, sum};
use crate::simd::vectorized;
use crate::{Error, Result, SavedBytes, cuda, tape};

mod on_cuda;

const NAME: &str = "linear_cross_entropy";

/// Bytes of logits at a time, unless the configuration sets the number of rows.
const CHUNK_BYTES: usize = 64 << 20;

/// Configuration of [`linear_cross_entropy`].
#[derive(Debug, Clone, PartialEq)]
pub struct LinearCrossEntropyConfig {
    /// The target that marks ignored rows. Default: `Some(-100)`, as in PyTorch.
    pub ignore_index: Option<i64>,
    /// Label smoothing: the fraction of each target that is spread evenly over all classes, from 0 to 1. Default: 0.
    pub label_smoothing: f64,
    /// Number of rows whose logits exist at a time. Default: as many as fit in 64 MiB. It affects the rounding of
    /// sums over rows.
    pub chunk_rows: Option<usize>,
}

impl Default for LinearCrossEntropyConfig {
    fn default() -> Self {
        Self { ignore_index: Some(-100), label_smoothing: 0.0, chunk_rows: None }
    }
}

impl LinearCrossEntropyConfig {
    fn validate(&self) -> Result<()> {
        let invalid =
            |field, got, help| Err(Error::InvalidConfig { of: "LinearCrossEntropyConfig", field, got, help });
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return invalid("label_smoothing", self.label_smoothing, "it must be from 0 to 1");
        }
        if self.chunk_rows == Some(0) {
            return invalid("chunk_rows", 0.0, "there must be a row at least");
        }
        Ok(())
    }
}

/// The mean cross-entropy of `x w' + b` over all rows that are not ignored: a language model's output layer and loss
/// in one operation, which never holds the logits of more than a chunk of rows.
///
/// With a vocabulary of 50,257 the logits of 2,048 tokens and their gradient are 820 MB in f32; here they are 64 MiB.
/// f16 and bf16 are computed in f32, with f32 copies of `x` and the weight, and products with the digits of the dtype; the
/// loss is then f32.
///
/// If all rows are ignored the loss is NaN, as in PyTorch.
///
/// # Shapes
/// `x` `(.., size)`; weight `(classes, size)`; bias, if there is one, `(classes)`; targets, of u8, u32 or i64, as `x` without the last
/// dimension. The loss has no dimensions.
///
/// # Cost
/// One matrix product, and two more if an input is part of a graph: gradients of `x`, weight and bias are computed
/// along with the loss, chunk by chunk, and kept until backward, which only scales them. The bits do not depend on
/// the number of threads. CUDA devices have larger chunks, of 512 MiB, and compute products of bf16 in bf16. On other
/// devices it is composed of candle's operations, which keep the logits of all chunks.
///
/// # Errors
/// Shapes or dtypes that do not fit; a target that is not a class; dtypes other than f16, bf16, f32 and f64;
/// [`Error::InvalidConfig`].
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use ops::{LinearCrossEntropyConfig, linear_cross_entropy};
///
/// let hidden = Var::new(&[[1f32, 0.], [0., 1.]], &Device::Cpu)?;
/// let weight = Var::zeros((3, 2), candle_core::DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[2i64, -100], &Device::Cpu)?; // the second row does not count
/// let loss = linear_cross_entropy(&hidden, &weight, None, &targets, &LinearCrossEntropyConfig::default())?;
/// assert_eq!(loss.to_scalar::<f32>()?, 3f32.ln());
/// let grads = loss.backward()?;
/// assert!(grads.get(&hidden).is_some() && grads.get(&weight).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    config: &LinearCrossEntropyConfig,
) -> candle_core::Result<Tensor> {
    config.validate()?;
    let sizes = check(x, weight, bias)?;
    let targets = classes(NAME, x, sizes.classes, targets, config.ignore_index)?;
    // Gradients of f16 would be too small before a scaled loss makes them larger.
    if cuda::knows(x) && x.dtype() != DType::F16 {
        return on_cuda::loss(x, weight, bias, &targets, config);
    }
    let dtype = working_dtype(NAME, x.dtype())?;
    let wide = |tensor: &Tensor| cast(tensor, dtype)?.contiguous();
    let how = ProductConfig::of(x.dtype()).in_parallel();
    let (x, weight, bias) = (wide(x)?, wide(weight)?, bias.map(wide).transpose()?);
    let chunk_rows =
        config.chunk_rows.unwrap_or(fitting_rows(sizes.classes, dtype)).min(targets.len()).max(1);
    let smoothing = config.label_smoothing;
    if !x.device().is_cpu() {
        return composed(&x, &weight, bias.as_ref(), &targets, smoothing, chunk_rows);
    }
    // The operation takes three inputs: an empty one stands for no bias.
    let bias = bias.map_or_else(|| Tensor::zeros(0, dtype, x.device()), Ok)?;
    let tracked = [&x, &weight, &bias].map(|tensor| tensor.track_op());
    let kept = SavedBytes::default();
    let numbers = [&x, &weight, &bias].into_iter().filter(|tensor| tensor.track_op());
    let bytes = numbers.map(|tensor| tensor.elem_count() * dtype.size_in_bytes()).sum::<usize>();
    let bytes = bytes + size_of_val(&targets[..]);
    let saved = Mutex::default();
    let loss = Loss { sizes, targets, smoothing, chunk_rows, tracked, how, saved, kept: kept.clone() };
    let loss = tape::apply_op3(&x, &weight, &bias, loss)?;
    kept.by(&loss, bytes);
    Ok(loss)
}

/// Number of rows whose logits are computed at a time, at least 1.
pub(super) fn fitting_rows(classes: usize, dtype: DType) -> usize {
    (CHUNK_BYTES / (classes * dtype.size_in_bytes()).max(1)).max(1)
}

/// Features of a row, and number of classes.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    width: usize,
    classes: usize,
}

fn check(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Sizes> {
    let unfit = |tensor, expected: Vec<usize>, got: &Tensor| {
        Err(Error::ShapeMismatch { operation: NAME, tensor, expected, got: got.dims().to_vec() })
    };
    let Some(&width) = x.dims().last() else { return unfit("x", vec![1], x) };
    let classes = weight.dims().first().copied().unwrap_or(1);
    if weight.dims() != [classes, width] {
        return unfit("weight", vec![classes, width], weight);
    }
    if let Some(bias) = bias.filter(|bias| bias.dims() != [classes]) {
        return unfit("bias", vec![classes], bias);
    }
    for (tensor, parameter) in [("weight", Some(weight)), ("bias", bias)] {
        if let Some(parameter) = parameter.filter(|parameter| parameter.dtype() != x.dtype()) {
            let (expected, got) = (x.dtype(), parameter.dtype());
            return Err(Error::DTypeMismatch { operation: NAME, tensor, expected, got });
        }
    }
    Ok(Sizes { width, classes })
}

fn composed(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Targets,
    smoothing: f64,
    chunk_rows: usize,
) -> candle_core::Result<Tensor> {
    let (classes, width) = weight.dims2()?;
    let rows = x.reshape((targets.len(), width))?;
    let count = targets.iter().flatten().count() as f64;
    let mut total = Tensor::zeros((), x.dtype(), x.device())?;
    for (at, targets) in targets.chunks(chunk_rows).enumerate() {
        let part = rows.narrow(0, at * chunk_rows, targets.len())?;
        let logits =
            candle_nn::Module::forward(&candle_nn::Linear::new(weight.clone(), bias.cloned()), &part)?;
        let counted: Vec<u32> = (0..).zip(targets).filter(|(_, t)| t.is_some()).map(|(row, _)| row).collect();
        if counted.is_empty() {
            continue;
        }
        let picked: Vec<u32> = targets.iter().flatten().map(|&class| class as u32).collect();
        let picked = Tensor::from_vec(picked, (counted.len(), 1), x.device())?;
        let counted = Tensor::new(counted, x.device())?;
        let logs = super::log_softmax(&logits.index_select(&counted, 0)?)?;
        let hits = (logs.gather(&picked, 1)?.sum_all()? * (smoothing - 1.0))?;
        total = (total + hits)?;
        // Without smoothing, classes with a logit of minus infinity must not contribute.
        if smoothing > 0.0 {
            total = (total + (logs.sum_all()? * (-smoothing / classes as f64))?)?;
        }
    }
    total / count
}

struct Loss {
    sizes: Sizes,
    targets: Targets,
    smoothing: f64,
    chunk_rows: usize,
    /// Which of x, weight and bias need a gradient.
    tracked: [bool; 3],
    how: ProductConfig,
    /// Their gradients for a loss gradient of 1.
    saved: Mutex<Option<[CpuStorage; 3]>>,
    #[expect(dead_code, reason = "releases its count when dropped")]
    kept: SavedBytes,
}

/// x, weight and bias, which may be empty.
type Inputs<'a, T> = [&'a [T]; 3];

impl Loss {
    /// Returns the loss and the gradients of the tracked inputs; those of the others are empty.
    fn run<T: Accumulator>(&self, [x, weight, bias]: Inputs<'_, T>) -> candle_core::Result<(T, [Vec<T>; 3])> {
        let Sizes { width, classes } = self.sizes;
        let weight = Matrix::new(weight, classes, width, width);
        let [for_x, for_weight, for_bias] = self.tracked;
        let zeros = |wanted: bool, len: usize| vec![T::zero(); if wanted { len } else { 0 }];
        let [mut of_x, mut of_bias] = [zeros(for_x, x.len()), zeros(for_bias, classes)];
        // Large ones are not filled with zeros first.
        let (mut logits, mut of_weight) = (Vec::new(), Vec::new());
        let mut total = 0.0;
        for (at, targets) in self.targets.chunks(self.chunk_rows).enumerate() {
            let rows = at * self.chunk_rows..at * self.chunk_rows + targets.len();
            let numbers = rows.start * width..rows.end * width;
            let x = Matrix::new(&x[numbers.clone()], rows.len(), width, width);
            multiply_into(&mut logits, (x, weight.t()), self.how)?;
            total += self.rows(&mut logits, targets, bias);
            let logits_matrix = Matrix::new(&logits, rows.len(), classes, classes);
            if for_x {
                multiply(&mut of_x[numbers], (logits_matrix, weight), T::one(), false, self.how)?;
            }
            if for_weight && at == 0 {
                multiply_into(&mut of_weight, (logits_matrix.t(), x), self.how)?;
            } else if for_weight {
                multiply(&mut of_weight, (logits_matrix.t(), x), T::one(), true, self.how)?;
            }
            if for_bias {
                let sums = column_sums(&logits, classes);
                of_bias.iter_mut().zip(sums).for_each(|(total, sum)| *total += sum);
            }
        }
        // Where there are no rows.
        of_weight.resize(if for_weight { classes * width } else { 0 }, T::zero());
        let count = self.targets.iter().flatten().count() as f64;
        Ok((T::from_f64(total / count), [of_x, of_weight, of_bias]))
    }

    /// Returns the sum of some rows' losses. Replaces their logits, given without the bias, by the gradients if any
    /// are needed.
    fn rows<T: Real>(&self, logits: &mut [T], targets: &[Option<usize>], bias: &[T]) -> f64 {
        let classes = self.sizes.classes.max(1);
        let count = self.targets.iter().flatten().count() as f64;
        let losses = blocks([logits], of_rows(classes), |at, [logits]| {
            vectorized!({
                let mut losses = 0.0;
                for (row, target) in logits.chunks_exact_mut(classes).zip(&targets[at / classes..]) {
                    row.iter_mut().zip(bias).for_each(|(x, &b)| *x += b);
                    losses += match *target {
                        Some(class) => self.row(row, class, 1.0 / count),
                        None => {
                            row.fill(T::zero());
                            0.0
                        }
                    };
                }
                losses
            })
        });
        losses.into_iter().sum()
    }

    #[inline(always)]
    fn row<T: Real>(&self, row: &mut [T], class: usize, share: f64) -> f64 {
        let classes = row.len() as f64;
        let top = max(row);
        let target = (row[class] - top).to_f64();
        let even = if self.smoothing > 0.0 { sum(row, |x| x - top).to_f64() / classes } else { 0.0 };
        row.iter_mut().for_each(|x| *x = (*x - top).exp_nonpositive());
        let total = sum(row, |x| x);
        if self.tracked.contains(&true) {
            let scale = T::from_f64(share) / total;
            if self.smoothing > 0.0 {
                let spread = T::from_f64(self.smoothing / classes * share);
                row.iter_mut().for_each(|x| *x = *x * scale - spread);
            } else {
                row.iter_mut().for_each(|x| *x *= scale);
            }
            row[class] -= T::from_f64((1.0 - self.smoothing) * share);
        }
        ln(total).to_f64() - (1.0 - self.smoothing) * target - self.smoothing * even
    }

    fn forward<T: Accumulator>(
        &self,
        inputs: [(&CpuStorage, &Layout); 3],
    ) -> candle_core::Result<CpuStorage> {
        let [x, weight, bias] = inputs.map(|(storage, layout)| dense::<T>(storage, layout));
        let (loss, gradients) = self.run([x?, weight?, bias?])?;
        if self.tracked.contains(&true) {
            let gradients = gradients.map(T::to_cpu_storage_owned);
            *lock(&self.saved) = Some(gradients);
        }
        Ok(T::to_cpu_storage_owned(vec![loss]))
    }

    fn backward<T: Accumulator>(
        &self,
        tensors: [&Tensor; 3],
        of_loss: T,
    ) -> candle_core::Result<[Option<Tensor>; 3]> {
        let saved = lock(&self.saved).take();
        let [x, weight, bias] = tensors;
        let gradients = match saved {
            Some([x, weight, bias]) => {
                [T::cpu_storage_data(x)?, T::cpu_storage_data(weight)?, T::cpu_storage_data(bias)?]
            }
            // A second backward: the first one moved the saved gradients out.
            None => with_numbers(x, |x| {
                with_numbers(weight, |weight| {
                    with_numbers(bias, |bias| Ok(self.run::<T>([x, weight, bias])?.1))
                })
            })?,
        };
        let mut found = [None, None, None];
        for (((found, mut numbers), like), tracked) in
            found.iter_mut().zip(gradients).zip(tensors).zip(self.tracked)
        {
            if !tracked {
                continue;
            }
            if of_loss != T::one() {
                blocks([&mut numbers], crate::blocks::BLOCK, |_, [numbers]| {
                    numbers.iter_mut().for_each(|g| *g *= of_loss);
                });
            }
            *found = Some(Tensor::from_vec(numbers, like.shape(), like.device())?);
        }
        Ok(found)
    }
}

impl CustomOp3 for Loss {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let inputs = [(x, x_layout), (weight, weight_layout), (bias, bias_layout)];
        let loss = match x {
            CpuStorage::F32(_) => self.forward::<f32>(inputs)?,
            CpuStorage::F64(_) => self.forward::<f64>(inputs)?,
            _ => bail!("{NAME}: neither f32 nor f64"),
        };
        Ok((loss, Shape::from(())))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [of_x, of_weight, of_bias] = match x.dtype() {
            DType::F32 => self.backward::<f32>([x, weight, bias], gradient.to_scalar()?)?,
            _ => self.backward::<f64>([x, weight, bias], gradient.to_scalar()?)?,
        };
        Ok((of_x, of_weight, of_bias))
    }
}

#[cfg(test)]
mod tests;
