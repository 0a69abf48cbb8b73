//! Products of each expert's rows with its own weight.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Tensor};

use super::order::Groups;
use crate::defer::defer;
use crate::lock::lock;
use crate::tape::{explicit_op1, explicit_op2};
use crate::{Precision, kept_result};

/// Multiplies each expert's rows of `x`, sorted by expert, by the transpose of its weight. The gradients of weights are multiplied
/// by `share`.
///
/// # Shapes
/// `x` `(pairs, inputs)`, weights `(outputs, inputs)`, to `(pairs, outputs)`.
pub(super) fn grouped(x: &Tensor, weights: &[Tensor], groups: &Groups, share: f64) -> Result<Tensor> {
    let (x, precision) = (x.contiguous()?, Precision::current());
    let weights = weights.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
    kept_result(|known| {
        let (rows, outputs) = (x.dim(0)?, weights[0].dim(0)?);
        let y = match known {
            Some(known) if known.dims() == [rows, outputs] => known.detach().force_contiguous()?,
            _ => {
                let turned = |weight: &Tensor| weight.detach().t();
                products(&x, &weights, groups, (precision, outputs), turned)?
            }
        };
        let (token, gradients) = bundle(&weights)?;
        let (groups, weights) = (groups.clone(), weights.clone());
        explicit_op2("experts", [&x, &token], y, move |[x, token], gradient| {
            let (gradient, inputs) = (gradient.detach().contiguous()?, x.dim(1)?);
            let as_they_lie = |weight: &Tensor| Ok(weight.detach());
            let of_x = x.track_op();
            let of_x = of_x.then(|| products(&gradient, &weights, &groups, (precision, inputs), as_they_lie));
            let of_x = of_x.transpose()?;
            if !token.track_op() {
                return Ok([of_x, None]);
            }
            let tracked: Vec<bool> = weights.iter().map(Tensor::track_op).collect();
            let (late, groups, shape) = (x.detach(), groups.clone(), weights[0].shape().clone());
            let of_weights = move || {
                let experts = groups.of_experts().zip(&tracked).filter(|(_, is_tracked)| **is_tracked);
                let of = |(places, _): (std::ops::Range<usize>, _)| match places.is_empty() {
                    // No token has chosen this expert.
                    true => Tensor::zeros(&shape, late.dtype(), late.device()),
                    false => {
                        let part = |all: &Tensor| all.narrow(0, places.start, places.len());
                        let whole = product(precision, &part(&gradient)?.t()?, &part(&late)?)?;
                        if share == 1.0 { Ok(whole) } else { whole.affine(share, 0.0) }
                    }
                };
                experts.map(of).collect::<Result<Vec<_>>>()
            };
            let tracked: Vec<&Tensor> = weights.iter().filter(|weight| weight.track_op()).collect();
            if !defer(&tracked, of_weights.clone()) {
                *lock(&gradients) = of_weights()?.into_iter().map(Some).collect();
            }
            Ok([of_x, Some(token.zeros_like()?)])
        })
    })
}

/// Returns the products of each expert's rows and a matrix made of its weight, one below the other.
fn products(
    x: &Tensor,
    weights: &[Tensor],
    groups: &Groups,
    (precision, outputs): (Precision, usize),
    matrix: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    let x = x.detach();
    let experts = groups.of_experts().zip(weights).filter(|(places, _)| !places.is_empty());
    let of = |(places, weight): (std::ops::Range<usize>, &Tensor)| {
        product(precision, &x.narrow(0, places.start, places.len())?, &matrix(weight)?)
    };
    let parts = experts.map(of).collect::<Result<Vec<_>>>()?;
    match &parts[..] {
        [] => Tensor::zeros((0, outputs), x.dtype(), x.device()),
        [one] => Ok(one.clone()),
        several => Tensor::cat(several, 0),
    }
}

fn product(precision: Precision, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    match a.device().is_cpu() {
        true => precision.matmul(a, b),
        false => precision.product(a, b),
    }
}

/// Gradients of weights, in their order.
type Gradients = Arc<Mutex<Vec<Option<Tensor>>>>;

/// Returns a scalar that stands for all weights that are part of a graph, since an operation has three arguments at most. Who
/// uses it puts their gradients where the second result says before it returns a gradient of the scalar.
fn bundle(weights: &[Tensor]) -> Result<(Tensor, Gradients)> {
    let gradients = Gradients::default();
    let zero = || Tensor::zeros((), DType::F32, weights[0].device());
    let mut token: Option<Tensor> = None;
    for (index, weight) in weights.iter().filter(|weight| weight.track_op()).enumerate() {
        let own = gradients.clone();
        let own = move || lock(&own).get_mut(index).and_then(Option::take);
        token = Some(match token {
            None => explicit_op1("expert", [weight], zero()?, move |_, _| Ok([own()]))?,
            Some(token) => explicit_op2("expert", [&token, weight], zero()?, move |[token, _], _| {
                Ok([Some(token.zeros_like()?), own()])
            })?,
        });
    }
    Ok((token.map_or_else(zero, Ok)?, gradients))
}
