//! Tests of the output layer with its loss: the fused operation against the composed one.

use candle_core::{Device, Var};

use super::*;
use crate::op::assert_agree;

/// The fused operation equals the composed one, gradients included, in chunks of any size.
#[test]
fn composed_equals_fused() -> candle_core::Result<()> {
    let random = |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f64, 1., shape, &Device::Cpu)?);
    let (x, weight, bias) = (random(&[3, 2, 5])?, random(&[7, 5])?, random(&[7])?);
    let targets = Tensor::new(&[[0i64, 4], [-100, 2], [6, -100]], &Device::Cpu)?;
    for (label_smoothing, chunk_rows) in [(0.0, None), (0.1, Some(1)), (0.3, Some(4)), (1.0, Some(6))] {
        let config = LinearCrossEntropyConfig { label_smoothing, chunk_rows, ..Default::default() };
        let fused = linear_cross_entropy(&x, &weight, Some(&bias), &targets, &config)?;
        let found = classes(NAME, &x, 7, &targets, Some(-100))?;
        let chunk_rows = chunk_rows.unwrap_or(6);
        let composed = composed(&x, &weight, Some(&bias), &found, label_smoothing, chunk_rows)?;
        let loss = |loss: &Tensor| loss * 2.0;
        assert_agree([fused, composed], loss, &[&x, &weight, &bias], 1e-13, &format!("{config:?}"))?;
    }
    Ok(())
}

/// Such classes occur where a vocabulary is padded.
#[test]
fn a_class_that_cannot_be_counts_nothing() -> candle_core::Result<()> {
    let (x, weight) =
        (Tensor::ones((2, 3), DType::F64, &Device::Cpu)?, Tensor::ones((3, 3), DType::F64, &Device::Cpu)?);
    let bias = Tensor::new(&[0.0, 0.0, f64::NEG_INFINITY], &Device::Cpu)?;
    let targets = Tensor::new(&[0i64, 1], &Device::Cpu)?;
    let found = classes(NAME, &x, 3, &targets, None)?;
    let config = LinearCrossEntropyConfig::default();
    let fused = linear_cross_entropy(&x, &weight, Some(&bias), &targets, &config)?;
    for loss in [fused, composed(&x, &weight, Some(&bias), &found, 0.0, 1)?] {
        assert!((loss.to_scalar::<f64>()? - 2f64.ln()).abs() < 1e-12, "{loss}");
    }
    Ok(())
}
