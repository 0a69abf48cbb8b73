//! A linear layer of which each rank has some of the inputs.

use candle_core::Tensor;
use comm::{Operation, ReduceOp, autograd};

use crate::averaging::Weight;
use crate::context::sequence_dim;
use crate::{Context, Result};

use super::{column_sums, rows, with_features};

/// The sum over ranks of `x w'`, for this rank's inputs and columns of the weight, plus the bias, once.
///
/// With sequence parallelism each rank gets its part of the sequence of that sum.
pub(crate) fn row(x: &Tensor, weight: &Weight, bias: Option<&Tensor>, context: &Context) -> Result<Tensor> {
    let (flat, matrix) = (rows(x)?, weight.value());
    let partial = flat.matmul(&matrix.t()?)?.reshape(with_features(x, matrix.dim(0)?))?;
    let mut output = match context.sequence_parallel() {
        true => autograd::reduce_scatter(&partial, context.check_sequence(x.dims())?, context.comm())?,
        false => {
            let op = ReduceOp::Sum;
            context.comm().run(Operation::AllReduce { tensor: partial.clone(), op })?;
            partial
        }
    };
    if let Some(bias) = bias {
        output = output.broadcast_add(&bias.detach())?;
    }
    let (context, dims, needs_input) = (context.clone(), x.dims().to_vec(), x.track_op());
    let (has_bias, of) = (bias.is_some(), weight.clone());
    let backward = move |gradient: &Tensor| {
        let of_bias = if has_bias { Some(column_sums(&rows(gradient)?)?) } else { None };
        let gradient = match context.sequence_parallel() {
            true => {
                let dim = sequence_dim(gradient.dims())?;
                rows(&autograd::gather_from_group(&gradient.detach(), dim, context.comm())?)?
            }
            false => rows(gradient)?,
        };
        let of_weight = of.gradient(gradient.t()?.matmul(&flat)?)?;
        let of_input = if needs_input { Some(gradient.matmul(&matrix)?.reshape(&dims[..])?) } else { None };
        Result::Ok([of_input, Some(of_weight), of_bias])
    };
    let inputs: Vec<&Tensor> = [x, weight.node()].into_iter().chain(bias).collect();
    let count = inputs.len();
    Ok(autograd::custom("row_parallel_linear", &inputs, output, move |gradient| {
        let mut gradients = Vec::from(backward(gradient)?);
        gradients.truncate(count);
        Ok(gradients)
    })?)
}
