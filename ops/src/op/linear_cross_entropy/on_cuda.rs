//! Output layer and loss on CUDA devices: products of candle's, and a kernel for the rows.

use candle_core::{DType, Result, Tensor};

use super::super::cross_entropy::{Targets, numbers};
use super::{LinearCrossEntropyConfig, NAME};
use crate::{Precision, SavedBytes, cuda, tape};

/// Bytes of logits at a time, unless the configuration sets the number of rows: more than on a CPU, since a device needs large
/// products.
const CHUNK_BYTES: usize = 512 << 20;

/// The loss, with the gradients for backward.
pub(super) fn loss(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Targets,
    config: &LinearCrossEntropyConfig,
) -> Result<Tensor> {
    let (classes, width) = weight.dims2()?;
    let fit = CHUNK_BYTES / (classes * x.dtype().size_in_bytes()).max(1);
    let chunk_rows = config.chunk_rows.unwrap_or(fit.max(1)).min(targets.len());
    let count = targets.iter().flatten().count() as f64;
    let targets = numbers(targets, x.device())?;
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let own = Detached {
        x: x.detach().reshape((targets.elem_count(), width))?,
        weight: weight.detach(),
        bias: bias.as_ref().map(Tensor::detach),
        precision: Precision::current(),
    };
    let tracked = [Some(&x), Some(&weight), bias.as_ref()].map(|x| x.is_some_and(Tensor::track_op));
    let (mut total, mut sums) = (None, Sums::default());
    for start in (0..targets.elem_count()).step_by(chunk_rows) {
        let rows = chunk_rows.min(targets.elem_count() - start);
        let (part, targets) = (own.x.narrow(0, start, rows)?, targets.narrow(0, start, rows)?);
        let logits = own.precision.product(&part, &own.weight.t()?)?;
        let logits = own.bias.as_ref().map_or(Ok(logits.clone()), |bias| logits.broadcast_add(bias))?;
        let losses = cuda::cross_entropy(&logits, &targets, config.label_smoothing, 1.0 / count)?;
        total = Some(added(total, losses.sum_all()?)?);
        sums.add(&part, &own, &logits, tracked)?;
    }
    let loss =
        total.map_or_else(|| Tensor::zeros((), DType::F32, x.device()), Ok)?.affine(1.0 / count, 0.0)?;
    let gradients = sums.finish(x.shape(), x.dtype())?;
    let bytes = |gradient: &Tensor| gradient.elem_count() * gradient.dtype().size_in_bytes();
    let (bytes, kept) = (gradients.iter().flatten().map(bytes).sum(), SavedBytes::default());
    let saved = Saved { gradients, _kept: kept.clone() };
    let loss = match &bias {
        Some(bias) => {
            tape::explicit_op3(NAME, [&x, &weight, bias], loss, move |_, of_loss| saved.scaled(of_loss))
        }
        None => tape::explicit_op2(NAME, [&x, &weight], loss, move |_, of_loss| {
            let [of_x, of_weight, _] = saved.scaled(of_loss)?;
            Ok([of_x, of_weight])
        }),
    }?;
    kept.by(&loss, bytes);
    Ok(loss)
}

struct Detached {
    /// (rows, width).
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    precision: Precision,
}

/// Gradients of the chunks so far, for a gradient of the loss of 1.
#[derive(Default)]
struct Sums {
    of_x: Vec<Tensor>,
    of_weight: Option<Tensor>,
    of_bias: Option<Tensor>,
}

impl Sums {
    /// Adds those of a chunk, given the gradient of its logits.
    fn add(&mut self, x: &Tensor, own: &Detached, of_logits: &Tensor, tracked: [bool; 3]) -> Result<()> {
        let [for_x, for_weight, for_bias] = tracked;
        if for_x {
            self.of_x.push(own.precision.product(of_logits, &own.weight)?);
        }
        if for_weight {
            self.of_weight = Some(added(self.of_weight.take(), own.precision.product(&of_logits.t()?, x)?)?);
        }
        if for_bias {
            let of_bias = of_logits.to_dtype(DType::F32)?.sum(0)?;
            self.of_bias = Some(added(self.of_bias.take(), of_bias)?);
        }
        Ok(())
    }

    fn finish(self, shape: &candle_core::Shape, dtype: DType) -> Result<[Option<Tensor>; 3]> {
        let of_x = match &self.of_x[..] {
            [] => None,
            [one] => Some(one.reshape(shape)?),
            several => Some(Tensor::cat(several, 0)?.reshape(shape)?),
        };
        let narrow = |sum: Option<Tensor>| sum.map(|sum| sum.to_dtype(dtype)).transpose();
        Ok([of_x, narrow(self.of_weight)?, narrow(self.of_bias)?])
    }
}

/// Sums of chunks; in f32, but for the first.
fn added(before: Option<Tensor>, more: Tensor) -> Result<Tensor> {
    match before {
        None => Ok(more),
        Some(before) => before.to_dtype(DType::F32)? + more.to_dtype(DType::F32)?,
    }
}

/// The gradients of x, weight and bias for a gradient of the loss of 1.
struct Saved {
    gradients: [Option<Tensor>; 3],
    _kept: SavedBytes,
}

impl Saved {
    fn scaled(&self, of_loss: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let mut scaled = [None, None, None];
        for (scaled, gradient) in scaled.iter_mut().zip(&self.gradients) {
            if let Some(gradient) = gradient {
                *scaled = Some(gradient.broadcast_mul(&of_loss.detach().to_dtype(gradient.dtype())?)?);
            }
        }
        Ok(scaled)
    }
}
