//! A linear layer of which each rank has some of the outputs.

use candle_core::{Module, Tensor};
use comm::autograd;
use training::{Linear, Precision};

use crate::averaging::Weight;
use crate::context::sequence_dim;
use crate::{Context, Result};

use super::reduce::Reduction;
use super::{bytes_of, keeping, kept, of_weights, rows, with_features};

/// `x w' + b` for this rank's rows of the weight. Backward, the sum over ranks of the input's gradient is under way while the
/// weight's is computed.
///
/// With sequence parallelism the input is this rank's part of the sequence, and is gathered first; its gradient is summed and
/// divided again.
pub(crate) fn column(
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Weight>,
    context: &Context,
) -> Result<Tensor> {
    keeping(|known| layer(x, weight, bias, context, known))
}

/// `known` is the result, where that was computed before.
fn layer(
    x: &Tensor,
    weight: &Weight,
    bias: Option<&Weight>,
    context: &Context,
    known: Option<Tensor>,
) -> Result<Tensor> {
    let input = match context.sequence_parallel() {
        true => autograd::gather_from_group(&x.detach(), sequence_dim(x.dims())?, context.comm())?,
        false => x.detach(),
    };
    let (flat, matrix, precision) = (rows(&input)?, weight.value(), Precision::current());
    // Another one than the input, which is the graph's.
    let bytes = if context.sequence_parallel() || !x.is_contiguous() { bytes_of(&flat) } else { 0 };
    let output = match (known, bias) {
        (Some(known), _) => known,
        (None, Some(bias)) => Linear::new(matrix.clone(), bias.value()).forward(&flat)?,
        (None, None) => precision.matmul(&flat, &matrix.t()?)?,
    };
    let output = output.reshape(with_features(&input, matrix.dim(0)?))?;
    let (context, dims, needs_input) = (context.clone(), input.dims().to_vec(), x.track_op());
    let variables: Vec<Weight> = [weight].into_iter().chain(bias).cloned().collect();
    let backward = move |gradient: &Tensor| {
        context.check_backward()?;
        let gradient = rows(gradient)?;
        let of_input = match needs_input {
            true => {
                let partial = precision.matmul(&gradient, &matrix)?.reshape(&dims[..])?;
                Some(Reduction::start(partial, &context)?)
            }
            false => None,
        };
        let of_weights = of_weights(&variables, [&gradient, &gradient], &flat, precision)?;
        let of_input = match of_input {
            Some(reduction) => {
                let _span = tracing::info_span!("wait for input gradient").entered();
                Some(reduction.finish()?)
            }
            None => None,
        };
        Ok((of_input, of_weights))
    };
    let inputs: Vec<&Tensor> = [x, weight.node()].into_iter().chain(bias.map(Weight::node)).collect();
    kept(bytes, "column_parallel_linear", &inputs, output, move |gradient| {
        let (of_input, of_weights) = backward(gradient).map_err(into_comm)?;
        Ok([of_input].into_iter().chain(of_weights).collect())
    })
}

fn into_comm(error: crate::Error) -> comm::Error {
    error.into()
}
