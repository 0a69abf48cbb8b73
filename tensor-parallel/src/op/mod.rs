//! Operations that compute and communicate in one, each with its own backward pass.

mod column;
mod cross_entropy;
mod embedding;
mod reduce;
mod row;

use candle_core::{Result, Tensor};
use comm::autograd;
use training::{Kept, Precision};

use crate::averaging::Weight;

pub(crate) use column::column;
pub use cross_entropy::vocab_parallel_cross_entropy;
pub(crate) use embedding::embedding;
pub(crate) use row::row;

/// What `make` gives; in a part of a model of which backward computes the cheap rest again, `make` is given what that was the first time, to
/// take the elements in place of the product and the communication.
fn keeping(make: impl FnOnce(Option<Tensor>) -> crate::Result<Tensor>) -> crate::Result<Tensor> {
    Ok(training::kept_result(|known| {
        let known = known.map(|known| known.force_contiguous()).transpose()?;
        Ok(make(known)?)
    })?)
}

/// [`autograd::custom`] of an operation that keeps so many bytes for backward which no tensor of the graph has.
fn kept(
    bytes: usize,
    name: &'static str,
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl Fn(&Tensor) -> comm::Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> crate::Result<Tensor> {
    let kept = Kept::default();
    let held = kept.clone();
    let output = autograd::custom(name, inputs, output, move |gradient| {
        let _kept = &held;
        backward(gradient)
    })?;
    kept.by(&output, bytes);
    Ok(output)
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// The rows of all dimensions but the last, outside of the graph.
fn rows(x: &Tensor) -> Result<Tensor> {
    let features = x.dims().last().copied().unwrap_or(1);
    let rows = x.elem_count() / features.max(1);
    x.detach().contiguous()?.reshape((rows, features))
}

/// The shape of `x` with another last dimension.
fn with_features(x: &Tensor, features: usize) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = features;
    }
    dims
}

/// The sum of each column.
fn column_sums(rows: &Tensor) -> Result<Tensor> {
    // As a matrix product, which sums in many short runs and is quick.
    let ones = Tensor::ones((1, rows.dim(0)?), rows.dtype(), rows.device())?;
    ones.matmul(rows)?.squeeze(0)
}

/// The gradients of a weight, whose outputs have the first gradient, and of a bias, where there is one, whose have the second;
/// none where they are put off.
fn of_weights(
    variables: &[Weight],
    [of_products, of_sums]: [&Tensor; 2],
    input: &Tensor,
    precision: Precision,
) -> Result<Vec<Option<Tensor>>> {
    if variables.iter().all(|weight| !weight.has_gradient()) {
        return Ok(vec![None; variables.len()]);
    }
    let (of_products, of_sums) = (of_products.detach(), of_sums.detach());
    let (input, has_bias) = (input.clone(), variables.len() > 1);
    let compute = move || {
        let _span = tracing::info_span!("weight gradient").entered();
        let mut all = vec![precision.matmul(&of_products.t()?, &input)?];
        if has_bias {
            all.push(column_sums(&of_sums)?);
        }
        Ok(all)
    };
    let weights: Vec<&Tensor> = variables.iter().map(Weight::variable).collect();
    match training::defer(&weights, compute.clone()) {
        true => Ok(vec![None; variables.len()]),
        false => {
            let given = variables.iter().zip(compute()?);
            given.map(|(weight, gradient)| weight.gradient(gradient).map(Some)).collect()
        }
    }
}
