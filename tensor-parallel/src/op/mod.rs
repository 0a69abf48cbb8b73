//! Operations that combine computation and communication, each with a custom backward.

mod column;
mod cross_entropy;
mod embedding;
mod reduce;
mod row;

use candle_core::{Result, Tensor};
use comm::autograd;
use ops::{Precision, SavedBytes};

pub(crate) use column::column;
pub use cross_entropy::{vocab_parallel_cross_entropy, vocab_parallel_log_probs};
pub(crate) use embedding::embedding;
pub(crate) use row::row;

/// Calls `make` and returns its result. When backward recomputes a part of the model in which such results are kept, `make`
/// receives the first result, whose elements it uses instead of repeating the product and the communication.
fn with_kept_result(make: impl FnOnce(Option<Tensor>) -> crate::Result<Tensor>) -> crate::Result<Tensor> {
    Ok(ops::kept_result(|known| {
        let known = known.map(|known| known.force_contiguous()).transpose()?;
        Ok(make(known)?)
    })?)
}

/// Does the same as [`autograd::custom_with_new_gradients`], for an operation that keeps `bytes` bytes for backward that no
/// tensor of the graph holds.
fn with_kept_bytes(
    bytes: usize,
    name: &'static str,
    inputs: &[&Tensor],
    output: Tensor,
    backward: impl Fn(&Tensor) -> comm::Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> crate::Result<Tensor> {
    let kept = SavedBytes::default();
    let held = kept.clone();
    let output = autograd::custom_with_new_gradients(name, inputs, output, move |gradient| {
        let _kept = &held;
        backward(gradient)
    })?;
    kept.by(&output, bytes);
    Ok(output)
}

fn bytes_of(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}

/// Flattens all dimensions except the last, and detaches from the graph.
fn rows(x: &Tensor) -> Result<Tensor> {
    let features = x.dims().last().copied().unwrap_or(1);
    let rows = x.elem_count() / features.max(1);
    x.detach().contiguous()?.reshape((rows, features))
}

/// Returns the shape of `x` with another last dimension.
fn with_features(x: &Tensor, features: usize) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last = features;
    }
    dims
}

/// Sums each column.
fn column_sums(rows: &Tensor) -> Result<Tensor> {
    // Computed as a matrix product, which sums in many short runs and is fast.
    let ones = Tensor::ones((1, rows.dim(0)?), rows.dtype(), rows.device())?;
    ones.matmul(rows)?.squeeze(0)
}

/// Computes the gradients of a weight, from the first output gradient, and of a bias if present, from the second. `None` for
/// all if there are none, or if they are deferred.
fn of_weights(
    variables: &[Tensor],
    [of_products, of_sums]: [&Tensor; 2],
    input: &Tensor,
    precision: Precision,
) -> Result<Vec<Option<Tensor>>> {
    if variables.iter().all(|weight| !weight.track_op()) {
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
    match ops::defer(&variables.iter().collect::<Vec<_>>(), compute.clone()) {
        true => Ok(vec![None; variables.len()]),
        false => Ok(compute()?.into_iter().map(Some).collect()),
    }
}
