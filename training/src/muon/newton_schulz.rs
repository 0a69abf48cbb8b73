//! The direction nearest to orthogonal, by products only.

use candle_core::{DType, Result, Tensor};
use ops::Precision;

/// Coefficients of the polynomial `a x + b x^3 + c x^5` of singular values.
const COEFFICIENTS: (f64, f64, f64) = (3.4445, -4.775, 2.0315);

/// Returns the matrix with singular values near 1 (between about 0.7 and 1.2) and the same singular vectors: `iterations` of a
/// polynomial, of the matrix divided by its norm, or by `eps` if that is larger.
pub(super) fn orthogonal(matrix: &Tensor, iterations: usize, eps: f64) -> Result<Tensor> {
    let (rows, columns) = matrix.dims2()?;
    let norm = matrix.to_dtype(DType::F64)?.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt();
    if norm == 0.0 {
        return Ok(matrix.clone());
    }
    // The products are smallest with the short side first.
    let turned = if rows > columns { matrix.t()?.contiguous()? } else { matrix.clone() };
    let mut x = (turned / norm.max(eps))?;
    let (a, b, c) = COEFFICIENTS;
    for _ in 0..iterations {
        let gram = Precision::F32.matmul(&x, &x.t()?)?;
        let update = ((&gram * b)? + (Precision::F32.matmul(&gram, &gram)? * c)?)?;
        x = ((&x * a)? + Precision::F32.matmul(&update, &x)?)?;
    }
    if rows > columns { x.t()?.contiguous() } else { Ok(x) }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// Singular values of a diagonal matrix are its elements: each goes through the polynomial.
    #[test]
    fn each_singular_value_goes_through_the_polynomial() -> Result<()> {
        let values = [3f64, 1.0, 0.25];
        let norm = values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let mut rows = vec![vec![0f64; 5]; 3];
        values.iter().enumerate().for_each(|(place, value)| rows[place][place] = *value);
        let wide = Tensor::new(rows, &Device::Cpu)?;
        for matrix in [wide.clone(), wide.t()?.contiguous()?] {
            let found = orthogonal(&matrix, 5, 1e-7)?;
            for (place, value) in values.iter().enumerate() {
                let mut x = value / norm;
                for _ in 0..5 {
                    x = 3.4445 * x - 4.775 * x.powi(3) + 2.0315 * x.powi(5);
                }
                let found = found.get(place)?.get(place)?.to_scalar::<f64>()?;
                assert!((found - x).abs() < 1e-12 && (0.6..1.3).contains(&x), "{found} {x}");
            }
        }
        assert_eq!(orthogonal(&wide.zeros_like()?, 5, 1e-7)?.abs()?.sum_all()?.to_scalar::<f64>()?, 0.0);
        Ok(())
    }
}
