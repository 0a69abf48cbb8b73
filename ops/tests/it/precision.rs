//! Products in a precision other than that of their operands: values and gradients of all layers that support them.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use ops::{
    AttentionConfig, AttentionMask, Linear, LinearCrossEntropyConfig, Precision, attention, autocast,
    linear_cross_entropy,
};

/// Returns a loss through three layers and the gradients of all variables, with products in the given precision.
fn run(precision: Precision, [x, weight, bias, last]: [&Var; 4]) -> Result<Vec<Tensor>> {
    let loss = autocast(precision, || {
        let hidden = Linear::new(weight.as_tensor().clone(), bias.as_tensor().clone()).forward(x)?;
        let mixed = attention(&hidden, &hidden, &hidden, &AttentionConfig::new(4, AttentionMask::Causal))?;
        let targets = Tensor::arange(0u32, 2 * 70, &Device::Cpu)?.reshape((2, 70))?;
        linear_cross_entropy(&mixed, last, None, &targets, &LinearCrossEntropyConfig::default())
    })?;
    // Backward runs outside of `autocast` and must use the precision of forward.
    let grads = loss.backward()?;
    let gradients = [x, weight, bias, last].map(|var| grads.get(var).cloned());
    let gradients: Option<Vec<Tensor>> = gradients.into_iter().collect();
    let gradients = gradients.ok_or_else(|| candle_core::Error::msg("a variable has no gradient"))?;
    Ok([vec![loss], gradients].concat())
}

/// The largest difference of two tensors, relative to the largest number of the first.
fn gap(one: &Tensor, other: &Tensor) -> Result<f64> {
    let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_dtype(DType::F64)?.to_scalar::<f64>();
    Ok(largest(&(one - other)?)? / largest(one)?)
}

#[test]
fn layers_keep_their_precision_in_backward() -> Result<()> {
    // The same numbers in every run: in a mean such as the loss, rounding errors may cancel by chance.
    let mut state = 1u64;
    let mut random = |dims: &[usize]| {
        let numbers = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        });
        let numbers: Vec<f32> = numbers.take(dims.iter().product()).collect();
        Var::from_tensor(&Tensor::from_vec(numbers, dims, &Device::Cpu)?)
    };
    let (x, weight) = (random(&[2, 70, 48])?, random(&[64, 48])?);
    let (bias, last) = (random(&[64])?, random(&[150, 64])?);
    let vars = [&x, &weight, &bias, &last];
    let exact = run(Precision::F32, vars)?;
    for (precision, least, most) in [(Precision::Bf16, 1e-6, 2e-2), (Precision::F32High, 0.0, 1e-4)] {
        let found = run(precision, vars)?;
        for (name, (exact, found)) in
            ["loss", "x", "weight", "bias", "last"].iter().zip(exact.iter().zip(&found))
        {
            assert_eq!((exact.dims(), exact.dtype()), (found.dims(), DType::F32), "{precision:?}: {name}");
            let gap = gap(exact, found)?;
            assert!(gap >= least && gap < most, "{precision:?}: {name} differs by {gap}");
        }
    }
    Ok(())
}

#[test]
fn other_dtypes_are_computed_as_always() -> Result<()> {
    let x = Tensor::randn(0f64, 1.0, (5, 40), &Device::Cpu)?;
    let layer = Linear::new(Tensor::randn(0f64, 1.0, (30, 40), &Device::Cpu)?, None);
    let rounded = autocast(Precision::Bf16, || layer.forward(&x))?;
    assert_eq!(rounded.to_vec2::<f64>()?, layer.forward(&x)?.to_vec2::<f64>()?);
    assert!(Precision::Bf16.matmul(&x, &x).is_err(), "shapes that do not fit");
    Ok(())
}

/// Broadcast views have strides of 0, which the kernels do not accept.
#[test]
fn what_is_repeated_is_multiplied_as_what_it_stands_for() -> Result<()> {
    let x = Tensor::arange(0f32, 40. * 50., &Device::Cpu)?.reshape((40, 50))?.affine(1e-3, -1.)?;
    let repeated = [
        Tensor::new(0.5f32, &Device::Cpu)?.broadcast_as((30, 40))?,
        x.narrow(1, 1, 40)?.narrow(0, 3, 1)?.broadcast_as((30, 40))?,
        x.narrow(1, 7, 1)?.narrow(0, 0, 30)?.broadcast_as((30, 40))?,
    ];
    for left in repeated {
        for precision in [Precision::Bf16, Precision::F32High] {
            let (found, dense) =
                (precision.matmul(&left, &x)?, precision.matmul(&left.force_contiguous()?, &x)?);
            assert_eq!(found.to_vec2::<f32>()?, dense.to_vec2::<f32>()?, "{precision:?}");
            let turned = precision.matmul(&x.t()?, &left.t()?)?;
            assert!(gap(&turned.t()?, &dense)? < 1e-6, "{precision:?}");
        }
    }
    Ok(())
}
