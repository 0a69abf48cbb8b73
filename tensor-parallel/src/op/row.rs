//! Row-parallel linear operation: each rank has some of the inputs.

use candle_core::Tensor;
use comm::{Operation, ReduceOp, autograd};
use ops::Precision;

use crate::context::sequence_dim;
use crate::{Context, Result};

use super::{bytes_of, of_weights, rows, with_features, with_kept_bytes, with_kept_result};

/// Returns the sum over ranks of `x w'`, for this rank's inputs and columns of the weight, plus the bias, once.
///
/// With sequence parallelism each rank gets its part of the sequence of that sum.
pub(crate) fn row(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, context: &Context) -> Result<Tensor> {
    with_kept_result(|known| layer(x, weight, bias, context, known))
}

/// `known` is the result, if it was computed before.
fn layer(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    context: &Context,
    known: Option<Tensor>,
) -> Result<Tensor> {
    let (flat, matrix, precision) = (rows(x)?, weight.detach(), Precision::current());
    let output = match known {
        Some(known) => known,
        None => {
            let partial = precision.matmul(&flat, &matrix.t()?)?;
            sum(partial.reshape(with_features(x, matrix.dim(0)?))?, bias, context)?
        }
    };
    // If `x` is not contiguous, `flat` is a copy, which the graph does not hold.
    let bytes = if x.is_contiguous() { 0 } else { bytes_of(&flat) };
    let (context, dims, needs_input) = (context.clone(), x.dims().to_vec(), x.track_op());
    let variables: Vec<Tensor> = [weight].into_iter().chain(bias).cloned().collect();
    let backward = move |gradient: &Tensor| {
        context.check_backward()?;
        let own = rows(gradient)?;
        let all = match context.sequence_parallel() {
            true => {
                let dim = sequence_dim(gradient.dims())?;
                rows(&autograd::gather_from_group(&gradient.detach(), dim, context.comm())?)?
            }
            false => own.clone(),
        };
        let of_input =
            if needs_input { Some(precision.matmul(&all, &matrix)?.reshape(&dims[..])?) } else { None };
        // The bias was added to this rank's part of the sequence only.
        let of_weights = of_weights(&variables, [&all, &own], &flat, precision)?;
        Result::Ok([of_input].into_iter().chain(of_weights).collect())
    };
    let inputs: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
    with_kept_bytes(bytes, "row_parallel_linear", &inputs, output, move |gradient| Ok(backward(gradient)?))
}

/// Sums over ranks, or returns this rank's part of the sequence of the sum, and adds the bias.
fn sum(partial: Tensor, bias: Option<&Tensor>, context: &Context) -> Result<Tensor> {
    let sum = match context.sequence_parallel() {
        true => autograd::reduce_scatter(&partial, context.check_sequence(partial.dims())?, context.comm())?,
        false => {
            let op = ReduceOp::Sum;
            context.comm().run(Operation::AllReduce { tensor: partial.clone(), op })?;
            partial
        }
    };
    Ok(match bias {
        Some(bias) => sum.broadcast_add(&bias.detach())?,
        None => sum,
    })
}
