//! One Adam step with candle's tensor operations, for devices and dtypes without the in-place step.

use candle_core::{Result, Tensor, Var, bail};

use super::{AdamState, Factors};
use crate::low_bits::LowBits;
use crate::state::{Buffer, state_dtype};

pub(super) fn step(
    var: &Var,
    low: &mut LowBits,
    grad: &Tensor,
    means: &mut AdamState,
    factors: Factors,
) -> Result<()> {
    let (Buffer::Tensor(m), Buffer::Tensor(v)) = (&means.of_gradients, &means.of_squares) else {
        bail!("adam: a mean was lost");
    };
    // Detached: means that are part of a graph would keep every step's tensors alive.
    let param = low.wide(var)?;
    let mut grad = grad.detach().to_dtype(state_dtype(var))?;
    if factors.scale != 1. {
        grad = grad.affine(factors.scale, 0.)?;
    }
    if factors.penalty != 0. {
        grad = (grad + (&param * factors.penalty)?)?;
    }
    let m = (m + ((grad.clone() - m)? * factors.fresh1)?)?;
    let v = ((v * factors.beta2)? + (grad.sqr()? * factors.fresh2)?)?;
    let root = ((v.sqrt()? / factors.root)? + factors.eps)?;
    let param = ((param * factors.shrink)? + ((&m * factors.rate)? / root)?)?;
    low.set(var, &param)?;
    (means.of_gradients, means.of_squares) = (Buffer::Tensor(m), Buffer::Tensor(v));
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::super::{AdamConfig, host};
    use super::*;

    fn means(var: &Var, on_host: bool) -> Result<AdamState> {
        let buffer = || match on_host {
            true => Buffer::zeros(var),
            false => Ok(Buffer::Tensor(var.to_dtype(state_dtype(var))?.zeros_like()?)),
        };
        Ok(AdamState { step: 0, of_gradients: buffer()?, of_squares: buffer()? })
    }

    #[test]
    fn agrees_with_the_step_in_place() -> Result<()> {
        // The parameter's dtype, the gradient's, and a bit more than one unit in the last place of a number below 4.
        let dtypes = [
            (DType::F32, DType::F32, 1e-6),
            (DType::BF16, DType::BF16, 0.017),
            (DType::BF16, DType::F32, 0.017),
            (DType::F16, DType::F16, 0.0021),
        ];
        let configs = [AdamConfig::default(), AdamConfig::adamw()];
        for (config, (dtype, of_grad, ulp)) in
            configs.iter().flat_map(|config| dtypes.map(|dtype| (config, dtype)))
        {
            let config = AdamConfig { learning_rate: 0.1, weight_decay: 0.1, ..config.clone() };
            // Several blocks.
            let random = || Tensor::rand(-1f32, 1., 40_000, &Device::Cpu);
            let start = random()?.to_dtype(dtype)?;
            let (a, b) = (Var::from_tensor(&start)?, Var::from_tensor(&start.copy()?)?);
            let (mut ma, mut mb) = (means(&a, true)?, means(&b, false)?);
            let [mut la, mut lb] = [LowBits::None, LowBits::None];
            for step_number in 1..5 {
                let grad = random()?.to_dtype(of_grad)?;
                host::step(&a, &mut la, &grad, &mut ma, config.factors(step_number, 0.5))?;
                step(&b, &mut lb, &grad, &mut mb, config.factors(step_number, 0.5))?;
            }
            let wide = |var: &Var| var.to_dtype(DType::F32);
            let gap = (wide(&a)? - wide(&b)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(gap < ulp, "{config:?}, {dtype:?}: {gap}");
            assert!((wide(&a)? - start.to_dtype(DType::F32)?)?.abs()?.max_all()?.to_scalar::<f32>()? > 0.1);
        }
        Ok(())
    }

    /// In f16 this gradient would underflow to 0 after scaling.
    #[test]
    fn half_types_are_scaled_in_f32() -> Result<()> {
        let var = Var::from_tensor(&Tensor::new(&[0f32], &Device::Cpu)?.to_dtype(DType::F16)?)?;
        let grad = Tensor::new(&[1e-6f32], &Device::Cpu)?.to_dtype(DType::F16)?;
        let config = AdamConfig { learning_rate: 0.5, ..AdamConfig::default() };
        step(&var, &mut LowBits::None, &grad, &mut means(&var, false)?, config.factors(1, 0.01))?;
        let moved = var.to_dtype(DType::F32)?.to_vec1::<f32>()?[0];
        assert!((-0.26..-0.24).contains(&moved), "{moved}");
        Ok(())
    }

    #[test]
    fn half_types_step_in_f32() -> Result<()> {
        let var = Var::from_tensor(&Tensor::new(&[1f32, -2.], &Device::Cpu)?.to_dtype(DType::BF16)?)?;
        let grad = Tensor::new(&[0.5f32, -0.25], &Device::Cpu)?.to_dtype(DType::BF16)?;
        let config = AdamConfig { learning_rate: 0.5, ..AdamConfig::default() };
        step(&var, &mut LowBits::None, &grad, &mut means(&var, false)?, config.factors(1, 1.))?;
        assert_eq!(var.to_dtype(DType::F32)?.to_vec1::<f32>()?, [0.5, -1.5]);
        Ok(())
    }
}
