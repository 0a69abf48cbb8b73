//! Binary cross-entropy of scores, as one operation.

use candle_core::{Result, Tensor, bail};

use crate::tape;

const NAME: &str = "binary_cross_entropy";

/// The mean over all elements of `-(y ln(p) + (1 - y) ln(1 - p))`, where `p` is the sigmoid of a score and `y` its target, from 0
/// to 1: PyTorch's `BCEWithLogitsLoss`. It is computed from the scores, so that none overflows.
///
/// # Shapes
/// Scores and targets have the same shape; the loss has no dimensions.
///
/// # Errors
/// Shapes, dtypes or devices that differ; no elements.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
///
/// let scores = Var::new(&[0f32, 200.0], &Device::Cpu)?;
/// let loss = ops::binary_cross_entropy(&scores, &Tensor::new(&[1f32, 1.0], &Device::Cpu)?)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 2f32.ln() / 2.0);
/// assert_eq!(loss.backward()?.get(&scores).unwrap().to_vec1::<f32>()?, [-0.25, 0.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn binary_cross_entropy(scores: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let count = scores.elem_count();
    if scores.shape() != targets.shape() || scores.dtype() != targets.dtype() || count == 0 {
        let of = |tensor: &Tensor| format!("{:?} of {:?}", tensor.dims(), tensor.dtype());
        bail!("{NAME}: scores are {}, targets {}; give as many of both", of(scores), of(targets))
    }
    let (x, targets) = (scores.detach(), targets.detach());
    // ln(1 + exp(x)) - x y, without exp of a number above 0.
    let softplus = (x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?)?;
    let loss = (softplus - (&x * &targets)?)?.mean_all()?;
    tape::explicit_op1(NAME, [scores], loss, move |[scores], gradient| {
        let gap = (sigmoid(&scores.detach())? - &targets)?;
        Ok([Some((gap.broadcast_mul(&gradient.detach())? * (1.0 / count as f64))?)])
    })
}

/// 1 / (1 + exp(-x)), also of far scores.
fn sigmoid(x: &Tensor) -> Result<Tensor> {
    // exp(-|x|) is at most 1; of a score below 0 the sigmoid is the rest of that of its amount.
    let small = x.abs()?.neg()?.exp()?;
    let of_amount = (&small + 1.0)?.recip()?;
    x.ge(0.0)?.where_cond(&of_amount, &(small * &of_amount)?)
}
