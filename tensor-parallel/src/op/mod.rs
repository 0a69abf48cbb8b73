//! Operations that compute and communicate in one, each with its own backward pass.

mod column;
mod cross_entropy;
mod embedding;
mod reduce;
mod row;

use candle_core::{Result, Tensor};

pub(crate) use column::column;
pub use cross_entropy::vocab_parallel_cross_entropy;
pub(crate) use embedding::embedding;
pub(crate) use row::row;

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
