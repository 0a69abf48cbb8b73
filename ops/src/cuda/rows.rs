//! Operations on rows: norms, the weights of attention, cross-entropy, sums of squares.

use candle_core::cuda::cudarc::driver::{CudaViewMut, LaunchConfig};
use candle_core::{CudaDevice, Result, Tensor};

use super::{
    Number, Seen, THREADS, alloc, by_dtype, by_row, device, in_place, launch, named, numbers_of, storage,
    tensor,
};

/// Blocks that share the rows of a backward; each has its own part of the parameters' gradients.
const BLOCKS: usize = 128;

/// Rows of `width` numbers, normalised and multiplied by the weight.
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    fn run<T: Number>(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
        let (device, width) = (device(x)?, weight.elem_count());
        let ((x_storage, l), (w_storage, m)) = (x.storage_and_layout(), weight.storage_and_layout());
        let mut y = alloc::<T>(device, x.elem_count())?;
        launch!(
            device,
            named::<T>("rows_rms_norm"),
            by_row(x.elem_count() / width, width),
            [numbers_of::<T>(storage(&x_storage)?, l)?, numbers_of::<T>(storage(&w_storage)?, m)?],
            [&mut y],
            [width as u32, eps as f32]
        );
        Ok(tensor(y, device, x.shape()))
    }
    by_dtype!(x.dtype(), run(x, weight, eps))
}

/// Returns the gradients of input and weight.
pub(crate) fn rms_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    eps: f64,
) -> Result<[Tensor; 2]> {
    let (of_x, [of_weight]) = norm_backward("rows_rms_norm_backward", [x, weight, gradient], eps)?;
    Ok([of_x, of_weight])
}

/// Rows of the weight's width, normalised, multiplied by the weight, and added to the bias.
pub(crate) fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    fn run<T: Number>(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
        let (device, width) = (device(x)?, weight.elem_count());
        let ((x_storage, l), (w_storage, m)) = (x.storage_and_layout(), weight.storage_and_layout());
        let (b_storage, n) = bias.storage_and_layout();
        let mut y = alloc::<T>(device, x.elem_count())?;
        launch!(
            device,
            named::<T>("rows_layer_norm"),
            by_row(x.elem_count() / width, width),
            [
                numbers_of::<T>(storage(&x_storage)?, l)?,
                numbers_of::<T>(storage(&w_storage)?, m)?,
                numbers_of::<T>(storage(&b_storage)?, n)?
            ],
            [&mut y],
            [width as u32, eps as f32]
        );
        Ok(tensor(y, device, x.shape()))
    }
    by_dtype!(x.dtype(), run(x, weight, bias, eps))
}

/// Returns the gradients of input, weight and bias.
pub(crate) fn layer_norm_backward(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    eps: f64,
) -> Result<[Tensor; 3]> {
    let (of_x, [of_weight, of_bias]) = norm_backward("rows_layer_norm_backward", [x, weight, gradient], eps)?;
    Ok([of_x, of_weight, of_bias])
}

/// Returns the gradient of a norm's input, and those of its `N` parameters.
fn norm_backward<const N: usize>(
    kernel: &str,
    inputs: [&Tensor; 3],
    eps: f64,
) -> Result<(Tensor, [Tensor; N])> {
    fn run<T: Number>(
        kernel: &str,
        [x, weight, gradient]: [&Tensor; 3],
        eps: f64,
        parameters: usize,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (device, width) = (device(x)?, weight.elem_count());
        let ((x_storage, l), (w_storage, m)) = (x.storage_and_layout(), weight.storage_and_layout());
        let (g_storage, n) = gradient.storage_and_layout();
        let rows = x.elem_count() / width;
        let blocks = rows.min(BLOCKS);
        let (mut of_x, mut parts) =
            (alloc::<T>(device, x.elem_count())?, alloc::<f32>(device, parameters * blocks * width)?);
        launch!(
            device,
            named::<T>(kernel),
            by_row(blocks, width),
            [
                numbers_of::<T>(storage(&x_storage)?, l)?,
                numbers_of::<T>(storage(&w_storage)?, m)?,
                numbers_of::<T>(storage(&g_storage)?, n)?
            ],
            [&mut of_x, &mut parts],
            [rows as u64, width as u32, eps as f32]
        );
        let mut all = Vec::with_capacity(parameters);
        for parameter in 0..parameters {
            let part = parts.slice(parameter * blocks * width..(parameter + 1) * blocks * width);
            let mut sums = alloc::<T>(device, width)?;
            let grid_dim = (width.div_ceil(32) as u32, 1, 1);
            launch!(
                device,
                named::<T>("rows_column_sums"),
                LaunchConfig { grid_dim, block_dim: (32, 8, 1), shared_mem_bytes: 0 },
                [part],
                [&mut sums],
                [blocks as u32, width as u32]
            );
            all.push(tensor(sums, device, weight.shape()));
        }
        Ok((tensor(of_x, device, x.shape()), all))
    }
    let (of_x, parameters) = by_dtype!(inputs[0].dtype(), run(kernel, inputs, eps, N))?;
    match <[Tensor; N]>::try_from(parameters) {
        Ok(parameters) => Ok((of_x, parameters)),
        Err(_) => candle_core::bail!("a norm has {N} parameters"),
    }
}

/// Replaces the scores of queries, (batch x heads x queries, keys), by the weights of the keys. Of `hidden`, u8 of (batch, keys), those
/// that are not 0 are hidden. `documents`, u32 of (batch, keys, 2), tells where the document of each key begins and ends.
pub(crate) fn attention_weights(
    scores: &Tensor,
    hidden: Option<&Tensor>,
    documents: Option<&Tensor>,
    seen: Seen,
) -> Result<()> {
    fn run<T: Number>(scores: &Tensor, masks: [Option<&Tensor>; 2], seen: Seen) -> Result<()> {
        let (device, Seen { heads, queries, keys, kind, window, scale }) = (device(scores)?, seen);
        let config = by_row(scores.elem_count() / keys, keys);
        in_place(scores, |storage_of_scores, _| {
            let scores = storage_of_scores.as_cuda_slice_mut::<T>()?;
            let sizes = [heads, queries, keys].map(|size| size as u32);
            let (window, scale) = (window.min(keys) as u32, scale as f32);
            let [hidden, documents] = masks.map(|mask| mask.map(Tensor::storage_and_layout));
            macro_rules! weights {
                ($kernel:literal, $($mask:expr),*) => {
                    launch!(
                        device,
                        named::<T>($kernel),
                        config,
                        [$($mask),*],
                        [scores],
                        [sizes[0], sizes[1], sizes[2], kind, window, scale]
                    )
                };
            }
            match (&documents, &hidden) {
                (None, None) => weights!("rows_attention_weights",),
                (None, Some((hidden, layout))) => {
                    weights!("rows_attention_weights_hidden", numbers_of::<u8>(storage(hidden)?, layout)?);
                }
                (Some((documents, layout)), None) => {
                    weights!(
                        "rows_attention_weights_documents",
                        numbers_of::<u32>(storage(documents)?, layout)?
                    );
                }
                (Some((documents, l)), Some((hidden, m))) => weights!(
                    "rows_attention_weights_documents_hidden",
                    numbers_of::<u32>(storage(documents)?, l)?,
                    numbers_of::<u8>(storage(hidden)?, m)?
                ),
            }
            Ok(())
        })
    }
    by_dtype!(scores.dtype(), run(scores, [hidden, documents], seen))
}

/// Replaces the gradients of the weights by those of the scores.
pub(crate) fn attention_weights_backward(weights: &Tensor, gradients: &Tensor, seen: Seen) -> Result<()> {
    fn run<T: Number>(weights: &Tensor, gradients: &Tensor, seen: Seen) -> Result<()> {
        let (device, Seen { queries, keys, kind, window, scale, .. }) = (device(weights)?, seen);
        let (weights_storage, layout) = weights.storage_and_layout();
        in_place(gradients, |gradients, _| {
            let gradients = gradients.as_cuda_slice_mut::<T>()?;
            launch!(
                device,
                named::<T>("rows_attention_weights_backward"),
                by_row(weights.elem_count() / keys, keys),
                [numbers_of::<T>(storage(&weights_storage)?, layout)?],
                [gradients],
                [queries as u32, keys as u32, kind, window.min(keys) as u32, scale as f32]
            );
            Ok(())
        })
    }
    by_dtype!(weights.dtype(), run(weights, gradients, seen))
}

/// Returns the f32 loss of each row of the logits, (rows, classes), and replaces them by the loss's gradient times `share`. A
/// target, u32 of (rows), that is no class is ignored.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor, smoothing: f64, share: f64) -> Result<Tensor> {
    fn run<T: Number>(logits: &Tensor, targets: &Tensor, smoothing: f64, share: f64) -> Result<Tensor> {
        let (device, (rows, classes)) = (device(logits)?, logits.dims2()?);
        let mut losses = alloc::<f32>(device, rows)?;
        let (targets, layout) = targets.storage_and_layout();
        in_place(logits, |logits, _| {
            let logits = logits.as_cuda_slice_mut::<T>()?;
            launch!(
                device,
                named::<T>("rows_cross_entropy"),
                by_row(rows, classes),
                [numbers_of::<u32>(storage(&targets)?, layout)?],
                [logits, &mut losses],
                [classes as u32, smoothing as f32, share as f32]
            );
            Ok(())
        })?;
        Ok(tensor(losses, device, &rows.into()))
    }
    by_dtype!(logits.dtype(), run(logits, targets, smoothing, share))
}

/// Returns the sum of the squares of each tensor, in f64. The host waits for the device once.
///
/// # Errors
/// candle's, from the device.
pub fn squares(tensors: &[Tensor]) -> Result<Vec<f64>> {
    fn run<T: Number>(x: &Tensor, device: &CudaDevice, sums: &mut CudaViewMut<'_, f64>) -> Result<()> {
        let (x_storage, layout) = x.storage_and_layout();
        let grid_dim = (sums.len() as u32, 1, 1);
        launch!(
            device,
            named::<T>("rows_squares"),
            LaunchConfig { grid_dim, block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 },
            [numbers_of::<T>(storage(&x_storage)?, layout)?],
            [sums],
            [x.elem_count() as u64]
        );
        Ok(())
    }
    /// Numbers of a block, where there are not too many.
    const NUMBERS: usize = 8192;
    let Some(first) = tensors.first() else { return Ok(vec![]) };
    let device = device(first)?;
    let blocks: Vec<usize> =
        tensors.iter().map(|x| x.elem_count().div_ceil(NUMBERS).clamp(1, BLOCKS)).collect();
    let mut sums = alloc::<f64>(device, blocks.iter().sum())?;
    let mut at = 0;
    for (x, blocks) in tensors.iter().zip(&blocks) {
        let mut sums = sums.slice_mut(at..at + blocks);
        by_dtype!(x.dtype(), run(x, device, &mut sums))?;
        at += blocks;
    }
    let sums = device.clone_dtoh(&sums)?;
    let mut left = &sums[..];
    let total = |blocks: usize| {
        let (own, rest) = left.split_at(blocks);
        left = rest;
        own.iter().sum()
    };
    Ok(blocks.into_iter().map(total).collect())
}
