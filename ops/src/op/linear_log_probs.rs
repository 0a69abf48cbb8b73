//! Output layer and log-probabilities of targets, without materializing the logits of all rows at once.

use candle_core::{DType, Tensor};

use super::cast::cast;
use super::cross_entropy::{Targets, classes};
use super::linear_cross_entropy::fitting_rows;
use super::{log_softmax, working_dtype};
use crate::blocks::{blocks, of_rows};
use crate::dense::with_numbers;
use crate::product::{Accumulator, Matrix, ProductConfig, multiply, multiply_into};
use crate::real::{Real, ln, max, sum};
use crate::simd::vectorized;
use crate::{Error, SavedBytes, tape};

const NAME: &str = "linear_log_probs";

/// The logarithm of each target's probability, where `x w'` are the logits: what [`linear_cross_entropy`](crate::linear_cross_entropy)
/// is the negative mean of. It is 0 where the target is `ignore_index`; such rows are not computed.
///
/// f16 and bf16 are computed in f32, with products in the digits of the dtype; the result is then f32.
///
/// # Shapes
/// `x` `(.., size)`; weight `(classes, size)`; targets, of u8, u32 or i64, as `x` without the last dimension, and so the result.
///
/// # Cost
/// One matrix product of the rows that count, and three in backward, which computes their logits again: they exist for a chunk of
/// rows at a time. On devices other than a CPU it is composed of candle's operations, which keep the logits for backward.
///
/// # Errors
/// Shapes or dtypes that do not fit; a target that is not a class; dtypes other than f16, bf16, f32 and f64.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let hidden = Var::new(&[[1f32, 0.], [0., 1.]], &Device::Cpu)?;
/// let weight = Var::zeros((3, 2), candle_core::DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[2i64, -100], &Device::Cpu)?; // the second row does not count
/// let log_probs = ops::linear_log_probs(&hidden, &weight, &targets, Some(-100))?;
/// assert_eq!(log_probs.to_vec1::<f32>()?, [-(3f32.ln()), 0.0]);
/// let grads = log_probs.sum_all()?.backward()?;
/// assert!(grads.get(&hidden).is_some() && grads.get(&weight).is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_log_probs(
    x: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    ignore_index: Option<i64>,
) -> candle_core::Result<Tensor> {
    let unfit = |tensor, expected: Vec<usize>, got: &Tensor| Error::ShapeMismatch {
        operation: NAME,
        tensor,
        expected,
        got: got.dims().to_vec(),
    };
    let size = x.dims().last().copied().ok_or_else(|| unfit("x", vec![1], x))?;
    let count = weight.dims().first().copied().unwrap_or(1);
    if weight.dims() != [count, size] {
        return Err(unfit("weight", vec![count, size], weight).into());
    }
    if weight.dtype() != x.dtype() {
        let (expected, got) = (x.dtype(), weight.dtype());
        return Err(Error::DTypeMismatch { operation: NAME, tensor: "weight", expected, got }.into());
    }
    let found = classes(NAME, x, count, targets, ignore_index)?;
    let dtype = working_dtype(NAME, x.dtype())?;
    let how = ProductConfig::of(x.dtype()).in_parallel();
    let wide = |tensor: &Tensor| cast(tensor, dtype)?.contiguous();
    let (x, weight) = (wide(x)?, wide(weight)?);
    let chunk_rows = fitting_rows(count, dtype);
    if !x.device().is_cpu() {
        return composed(&x, &weight, &found, chunk_rows)?.reshape(targets.shape());
    }
    let rows = Rows {
        counted: (0..).zip(found).filter_map(|(row, class)| Some((row, class?))).collect(),
        chunk_rows,
        how,
    };
    let (bytes, kept) = (size_of_val(&rows.counted[..]), SavedBytes::default());
    let result = match dtype {
        DType::F64 => rows.forward::<f64>(&x, &weight, targets.dims())?,
        _ => rows.forward::<f32>(&x, &weight, targets.dims())?,
    };
    let held = kept.clone();
    let result = tape::explicit_op2(NAME, [&x, &weight], result, move |[x, weight], gradient| {
        // As long as the rows, which this owns.
        let _ = &held;
        match gradient.dtype() {
            DType::F64 => rows.backward::<f64>(x, weight, gradient),
            _ => rows.backward::<f32>(x, weight, gradient),
        }
    })?;
    kept.by(&result, bytes);
    Ok(result)
}

fn composed(
    x: &Tensor,
    weight: &Tensor,
    targets: &Targets,
    chunk_rows: usize,
) -> candle_core::Result<Tensor> {
    let (device, rows) = (x.device(), x.reshape((targets.len(), weight.dim(1)?))?);
    let mut result = Tensor::zeros(targets.len(), x.dtype(), device)?;
    let counted: Vec<(u32, u32)> =
        (0..).zip(targets).filter_map(|(row, class)| Some((row, (*class)? as u32))).collect();
    if counted.is_empty() {
        // Backward passes through both all the same: others may wait for their gradients.
        return tape::explicit_op2(NAME, [x, weight], result, |of, _| {
            let [x, weight] = of.map(|tensor| tensor.zeros_like().map(|zero| Some(zero.detach())));
            Ok([x?, weight?])
        });
    }
    for part in counted.chunks(chunk_rows) {
        let places = Tensor::from_iter(part.iter().map(|(row, _)| *row), device)?;
        let picked = Tensor::from_iter(part.iter().map(|(_, class)| *class), device)?.unsqueeze(1)?;
        let logits = rows.index_select(&places, 0)?.matmul(&weight.t()?)?;
        result = result.index_add(&places, &log_softmax(&logits)?.gather(&picked, 1)?.squeeze(1)?, 0)?;
    }
    Ok(result)
}

/// The rows that count, each with its class.
struct Rows {
    counted: Vec<(usize, usize)>,
    chunk_rows: usize,
    how: ProductConfig,
}

/// Sizes and numbers of the inputs.
struct Inputs<'a, T> {
    x: &'a [T],
    weight: Matrix<'a, T>,
    width: usize,
    classes: usize,
}

impl Rows {
    fn with_inputs<T: Accumulator, R>(
        x: &Tensor,
        weight: &Tensor,
        f: impl FnOnce(&Inputs<'_, T>) -> candle_core::Result<R>,
    ) -> candle_core::Result<R> {
        let (classes, width) = weight.dims2()?;
        with_numbers(x, |x| {
            with_numbers(weight, |weight| {
                f(&Inputs { x, weight: Matrix::new(weight, classes, width, width), width, classes })
            })
        })
    }

    /// Calls `each` for each chunk, with its rows of `x` and their logits.
    fn for_each<T: Accumulator>(
        &self,
        inputs: &Inputs<'_, T>,
        mut each: impl FnMut(&[(usize, usize)], &[T], &mut [T]) -> candle_core::Result<()>,
    ) -> candle_core::Result<()> {
        let (mut own, mut logits) = (Vec::new(), Vec::new());
        for part in self.counted.chunks(self.chunk_rows) {
            own.clear();
            for (row, _) in part {
                own.extend_from_slice(&inputs.x[row * inputs.width..][..inputs.width]);
            }
            let x = Matrix::new(&own, part.len(), inputs.width, inputs.width);
            multiply_into(&mut logits, (x, inputs.weight.t()), self.how)?;
            each(part, &own, &mut logits)?;
        }
        Ok(())
    }

    fn forward<T: Accumulator>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        dims: &[usize],
    ) -> candle_core::Result<Tensor> {
        let mut result = vec![T::zero(); dims.iter().product()];
        Self::with_inputs(x, weight, |inputs| {
            self.for_each(inputs, |part, _, logits| {
                let found = blocks([logits], of_rows(inputs.classes), |at, [logits]| {
                    let rows = logits.chunks_exact(inputs.classes).zip(&part[at / inputs.classes..]);
                    vectorized!({ rows.map(|(row, (_, class))| log_prob(row, *class)).collect::<Vec<T>>() })
                });
                for ((row, _), log_prob) in part.iter().zip(found.into_iter().flatten()) {
                    result[*row] = log_prob;
                }
                Ok(())
            })
        })?;
        Tensor::from_vec(result, dims, x.device())
    }

    fn backward<T: Accumulator>(
        &self,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<[Option<Tensor>; 2]> {
        let gradient = gradient.flatten_all()?.to_vec1::<T>()?;
        let zeros = |of: &Tensor| vec![T::zero(); if of.track_op() { of.elem_count() } else { 0 }];
        let [mut of_x, mut of_weight] = [zeros(x), zeros(weight)];
        Self::with_inputs(x, weight, |inputs| {
            let (width, classes) = (inputs.width, inputs.classes);
            let mut of_part = Vec::new();
            self.for_each(inputs, |part, own, logits| {
                blocks([&mut *logits], of_rows(classes), |at, [logits]| {
                    vectorized!({
                        for (row, (place, class)) in
                            logits.chunks_exact_mut(classes).zip(&part[at / classes..])
                        {
                            of_logits(row, *class, gradient[*place]);
                        }
                    });
                });
                let of_logits = Matrix::new(logits, part.len(), classes, classes);
                if !of_x.is_empty() {
                    multiply_into(&mut of_part, (of_logits, inputs.weight), self.how)?;
                    for ((row, _), found) in part.iter().zip(of_part.chunks_exact(width)) {
                        of_x[row * width..][..width].copy_from_slice(found);
                    }
                }
                if !of_weight.is_empty() {
                    let own = Matrix::new(own, part.len(), width, width);
                    multiply(&mut of_weight, (of_logits.t(), own), T::one(), true, self.how)?;
                }
                Ok(())
            })
        })?;
        let tensor = |found: Vec<T>, like: &Tensor| match like.track_op() {
            true => Tensor::from_vec(found, like.shape(), like.device()).map(Some),
            false => Ok(None),
        };
        Ok([tensor(of_x, x)?, tensor(of_weight, weight)?])
    }
}

#[inline(always)]
fn log_prob<T: Real>(row: &[T], class: usize) -> T {
    let top = max(row);
    row[class] - top - ln(sum(row, |x| (x - top).exp_nonpositive()))
}

/// Replaces the logits by their gradient, for one of the target's log-probability.
#[inline(always)]
fn of_logits<T: Real>(row: &mut [T], class: usize, gradient: T) {
    let top = max(row);
    row.iter_mut().for_each(|x| *x = (*x - top).exp_nonpositive());
    let scale = -gradient / sum(row, |x| x);
    row.iter_mut().for_each(|x| *x *= scale);
    row[class] += gradient;
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;

    /// Chunks of any size give what candle's operations give, gradients included.
    #[test]
    fn composed_equals_fused() -> candle_core::Result<()> {
        let random = |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 1., shape, &Device::Cpu)?);
        let (x, weight) = (random(&[3, 2, 5])?, random(&[7, 5])?);
        let factors = Tensor::randn(0f64, 1., (3, 2), &Device::Cpu)?;
        let targets = Tensor::new(&[[0i64, 4], [-100, 2], [6, -100]], &Device::Cpu)?;
        let found = classes(NAME, &x, 7, &targets, Some(-100))?;
        let fused = linear_log_probs(&x, &weight, &targets, Some(-100))?;
        for chunk_rows in [1, 3, 9] {
            let composed = composed(&x, &weight, &found, chunk_rows)?.reshape((3, 2))?;
            let loss = |y: &Tensor| (y * &factors)?.sum_all();
            assert_agree(
                [fused.clone(), composed],
                loss,
                &[&x, &weight],
                1e-13,
                &format!("{chunk_rows} rows"),
            )?;
        }
        let counted = (0..6).zip(&found).filter_map(|(row, class)| Some((row, (*class)?))).collect();
        let rows = Rows { counted, chunk_rows: 3, how: ProductConfig::current() };
        let [of_x, of_weight] = rows.backward::<f64>(&x, &weight, &factors)?;
        let expected = (&fused * &factors)?.sum_all()?.backward()?;
        for (found, var) in [(of_x, &x), (of_weight, &weight)] {
            let gap = (found.unwrap() - expected.get(var).unwrap())?.abs()?.max_all()?.to_scalar::<f64>()?;
            assert!(gap < 1e-13, "{gap}");
        }
        Ok(())
    }
}
