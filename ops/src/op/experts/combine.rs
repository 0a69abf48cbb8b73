//! Weighted sum of the outputs of each token's experts.

use candle_core::{DType, Result, Tensor};
use half::{bf16, f16};

use super::order::Order;
use crate::blocks::{blocks_of_work, of_rows};
use crate::dense::with_numbers;
use crate::product::Element;
use crate::real::{Real, sum_pairs};
use crate::tape::explicit_op2;

/// Returns for each token the sum of its experts' outputs `x`, sorted by expert, times `weights`, in the order in which the router
/// has chosen them.
///
/// # Shapes
/// `x` `(pairs, size)`, weights `(tokens, per_token)` in f32 or f64, to `(tokens, size)`.
pub(super) fn combine(x: &Tensor, weights: &Tensor, order: &Order) -> Result<Tensor> {
    let order = order.clone();
    let (x, weights) = (x.contiguous()?, weights.contiguous()?);
    match (x.device().is_cpu(), x.dtype()) {
        (false, _) => composed(&x, &weights, &order),
        (_, DType::F32) => of::<f32>(&x, &weights, order),
        (_, DType::F64) => of::<f64>(&x, &weights, order),
        (_, DType::F16) => of::<f16>(&x, &weights, order),
        (_, _) => of::<bf16>(&x, &weights, order),
    }
}

fn of<T: Element>(x: &Tensor, weights: &Tensor, order: Order) -> Result<Tensor> {
    let shape = (weights.dim(0)?, x.dim(1)?);
    let y = with_numbers(x, |x: &[T]| {
        with_numbers(weights, |weights| Ok(T::narrow(sums(&T::widen(x), weights, shape.1, &order))))
    })?;
    let y = Tensor::from_vec(y, shape, x.device())?;
    explicit_op2("combine_experts", [x, weights], y, move |[x, weights], gradient| {
        let gradient = gradient.detach().contiguous()?;
        let (of_x, of_weights) = with_numbers(x, |x: &[T]| {
            with_numbers(weights, |weights| {
                with_numbers(&gradient, |gradient: &[T]| {
                    Ok(gradients(&T::widen(x), weights, &T::widen(gradient), (shape.1, &order)))
                })
            })
        })?;
        let of_x = Tensor::from_vec(T::narrow(of_x), x.shape(), x.device())?;
        Ok([Some(of_x), Some(Tensor::from_vec(of_weights, weights.shape(), x.device())?)])
    })
}

fn sums<T: Real>(x: &[T], weights: &[T], size: usize, order: &Order) -> Vec<T> {
    let per_token = order.per_token();
    let mut out = vec![T::zero(); weights.len() / per_token * size];
    blocks_of_work([&mut out], of_rows(size), x.len(), |at, [out]| {
        for (row, token) in out.chunks_exact_mut(size.max(1)).zip(at / size.max(1)..) {
            let pairs = token * per_token..(token + 1) * per_token;
            for (place, &weight) in order.places()[pairs.clone()].iter().zip(&weights[pairs]) {
                row.iter_mut().zip(&x[place * size..][..size]).for_each(|(sum, &x)| *sum += weight * x);
            }
        }
    });
    out
}

/// Returns the gradients of `x` and the weights.
fn gradients<T: Real>(
    x: &[T],
    weights: &[T],
    gradient: &[T],
    (size, order): (usize, &Order),
) -> (Vec<T>, Vec<T>) {
    let row_of = |pair: usize| &gradient[pair / order.per_token() * size..][..size];
    let mut of_x = vec![T::zero(); x.len()];
    blocks_of_work([&mut of_x], of_rows(size), x.len(), |at, [of_x]| {
        for (row, place) in of_x.chunks_exact_mut(size.max(1)).zip(at / size.max(1)..) {
            let pair = order.pairs()[place];
            row.iter_mut().zip(row_of(pair)).for_each(|(own, &g)| *own = weights[pair] * g);
        }
    });
    let of_weight =
        |(pair, place): (usize, &usize)| sum_pairs(&x[place * size..][..size], row_of(pair), |x, g| x * g);
    (of_x, order.places().iter().enumerate().map(of_weight).collect())
}

/// The same of candle's operations, for devices other than a CPU.
fn composed(x: &Tensor, weights: &Tensor, order: &Order) -> Result<Tensor> {
    let places = Tensor::from_iter(order.places().iter().map(|place| *place as u32), x.device())?;
    let (tokens, per_token) = weights.dims2()?;
    let wide = x.to_dtype(weights.dtype())?.index_select(&places, 0)?;
    let wide = wide.reshape((tokens, per_token, x.dim(1)?))?;
    wide.broadcast_mul(&weights.unsqueeze(2)?)?.sum(1)?.to_dtype(x.dtype())
}
