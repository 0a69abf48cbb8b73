//! The linear layer composed of candle's operations, with a backward of its own: for devices other than a CPU.

use candle_core::{Result, Tensor};

use super::NAME;
use crate::defer::defer;
use crate::{Precision, kept_result, tape};

/// `x w' + b`.
pub(super) fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (x, weight, precision) = (x.contiguous()?, weight.contiguous()?, Precision::current());
    kept_result(|known| {
        let mut dims = x.dims().to_vec();
        dims.pop();
        dims.push(weight.dim(0)?);
        let y = match known {
            Some(known) if known.dims() == dims => known.detach().force_contiguous()?,
            _ => {
                let y = precision.product(&rows(&x)?, &weight.detach().t()?)?;
                let y = bias.map_or(Ok(y.clone()), |bias| y.broadcast_add(&bias.detach()))?;
                y.reshape(dims)?
            }
        };
        match bias {
            Some(bias) => tape::explicit_op3(
                NAME,
                [&x, &weight, &bias.contiguous()?],
                y,
                move |[x, weight, bias], gradient| gradients(precision, x, weight, Some(bias), gradient),
            ),
            None => tape::explicit_op2(NAME, [&x, &weight], y, move |[x, weight], gradient| {
                let [of_x, of_weight, _] = gradients(precision, x, weight, None, gradient)?;
                Ok([of_x, of_weight])
            }),
        }
    })
}

/// The tensor as a matrix of its last dimension, without a graph.
fn rows(x: &Tensor) -> Result<Tensor> {
    let width = x.dim(x.rank() - 1)?;
    x.detach().reshape((x.elem_count() / width.max(1), width))
}

/// Returns the gradients of input, weight and, if there is one, bias. The last two are `None` if they are deferred, or if
/// both are frozen.
fn gradients(
    precision: Precision,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    gradient: &Tensor,
) -> Result<[Option<Tensor>; 3]> {
    let of_y = rows(&gradient.contiguous()?)?;
    // Input data needs no gradient.
    let of_x =
        x.track_op().then(|| precision.product(&of_y, &weight.detach())?.reshape(x.shape())).transpose()?;
    if !weight.track_op() && bias.is_none_or(|bias| !bias.track_op()) {
        return Ok([of_x, None, None]);
    }
    let (input, has_bias) = (rows(x)?, bias.is_some());
    let of_weights = move || {
        let mut found = vec![precision.product(&of_y.t()?, &input)?];
        if has_bias {
            found.push(of_y.sum(0)?);
        }
        Ok(found)
    };
    if defer(&[Some(weight), bias].into_iter().flatten().collect::<Vec<_>>(), of_weights.clone()) {
        return Ok([of_x, None, None]);
    }
    let mut of_weights = of_weights()?.into_iter();
    Ok([of_x, of_weights.next(), of_weights.next()])
}
