//! Rows times a number each.

use candle_core::{D, Result, Tensor};

use crate::tape::explicit_op2;

/// Each row of `x` times its number, as `x.broadcast_mul(numbers)`, but known to [`backward`](crate::tape::backward). On any device.
///
/// # Shapes
/// `(.., size)` and `(.., 1)` to `(.., size)`.
///
/// # Errors
/// Other shapes; different dtypes.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2.0], [3.0, 4.0]], &Device::Cpu)?;
/// let y = ops::scale_rows(&x, &Tensor::new(&[[2f32], [10.0]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[2.0, 4.0], [30.0, 40.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn scale_rows(x: &Tensor, numbers: &Tensor) -> Result<Tensor> {
    let y = x.detach().broadcast_mul(&numbers.detach())?;
    explicit_op2("scale_rows", [x, numbers], y, |[x, numbers], gradient| {
        let gradient = gradient.detach();
        let of_x = || gradient.broadcast_mul(&numbers.detach());
        let of_numbers = || (&gradient * x.detach())?.sum_keepdim(D::Minus1);
        Ok([x.track_op().then(of_x).transpose()?, numbers.track_op().then(of_numbers).transpose()?])
    })
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::super::assert_agree;
    use super::*;
    use crate::tape;

    #[test]
    fn it_is_candles_and_known() -> Result<()> {
        for dims in [&[5, 7][..], &[2, 3, 7]] {
            let mut of_numbers = dims.to_vec();
            *of_numbers.last_mut().expect("a dimension") = 1;
            let random = |dims: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 1., dims, &Device::Cpu)?);
            let (x, numbers) = (random(dims)?, random(&of_numbers)?);
            let loss = |y: &Tensor| y.sqr()?.sum_all();
            let both = [scale_rows(&x, &numbers)?, x.broadcast_mul(&numbers)?];
            assert_agree(both, loss, &[&x, &numbers], 1e-12, "rows")?;
            let y = scale_rows(&x, &numbers)?;
            assert!(tape::knows(&tape::scalar_with_gradient(&y, y.ones_like()?)?));
            let frozen = scale_rows(&x, &numbers.detach())?.sum_all()?.backward()?;
            assert!(frozen.get(&x).is_some() && frozen.get(&numbers).is_none());
        }
        Ok(())
    }
}
