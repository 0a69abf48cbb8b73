//! One SGD step with candle's tensor operations, for devices and dtypes without the in-place step.

use candle_core::{Result, Tensor, Var};

use super::SgdConfig;
use crate::low_bits::LowBits;
use crate::state::{Buffer, state_dtype};

pub(super) fn step(
    var: &Var,
    low: &mut LowBits,
    grad: &Tensor,
    direction: &mut Option<Buffer>,
    config: &SgdConfig,
    scale: f64,
) -> Result<()> {
    let wide = state_dtype(var);
    // Detached: a direction that is part of a graph would keep every step's tensors alive.
    let param = low.wide(var)?;
    let mut update = grad.detach().to_dtype(wide)?;
    if scale != 1. {
        update = update.affine(scale, 0.)?;
    }
    if config.weight_decay != 0. {
        update = (update + (&param * config.weight_decay)?)?;
    }
    if config.momentum != 0. {
        let fresh = match direction {
            Some(Buffer::Tensor(last)) => {
                ((&*last * config.momentum)? + (&update * (1. - config.dampening))?)?
            }
            // A copy of its own elements: the gradient may be a view of a bucket, which is overwritten before the next step.
            _ => update.force_contiguous()?,
        };
        update = if config.nesterov { (update + (&fresh * config.momentum)?)? } else { fresh.clone() };
        *direction = Some(Buffer::Tensor(fresh));
    }
    low.set(var, &(param - (update * config.learning_rate)?)?)
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::super::host;
    use super::*;

    #[test]
    fn agrees_with_the_step_in_place() -> Result<()> {
        for (momentum, dampening, weight_decay, nesterov) in [
            (0., 0., 0., false),
            (0., 0., 0.1, false),
            (0.9, 0., 0.1, true),
            (0.9, 0.3, 0., false),
            (0.9, 0., 0., true),
        ] {
            let config = SgdConfig { learning_rate: 0.1, momentum, dampening, weight_decay, nesterov };
            // With a bit more than one unit in the last place of a number below 2.
            for (dtype, ulp) in [(DType::F32, 1e-6), (DType::BF16, 0.0081), (DType::F16, 0.0011)] {
                let random = || Tensor::rand(-1f32, 1., 40_000, &Device::Cpu)?.to_dtype(dtype);
                let start = random()?;
                let (a, b) = (Var::from_tensor(&start)?, Var::from_tensor(&start.copy()?)?);
                let (mut da, mut db) = (None, None);
                let [mut la, mut lb] = [LowBits::None, LowBits::None];
                for _ in 0..4 {
                    let grad = random()?;
                    host::step(&a, &mut la, &grad, &mut da, &config, 0.5)?;
                    step(&b, &mut lb, &grad, &mut db, &config, 0.5)?;
                }
                let wide = |var: &Var| var.to_dtype(DType::F32);
                let gap = (wide(&a)? - wide(&b)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(gap < ulp, "{config:?}, {dtype:?}: {gap}");
            }
        }
        Ok(())
    }

    #[test]
    fn half_types_step_in_f32() -> Result<()> {
        for dtype in [DType::F16, DType::BF16] {
            let var = Var::from_tensor(&Tensor::new(&[1f32, -2.], &Device::Cpu)?.to_dtype(dtype)?)?;
            let grad = Tensor::new(&[0.5f32, 0.25], &Device::Cpu)?.to_dtype(dtype)?;
            let config = SgdConfig { learning_rate: 0.5, momentum: 0.5, ..SgdConfig::default() };
            let (mut direction, mut low) = (None, LowBits::None);
            step(&var, &mut low, &grad, &mut direction, &config, 1.)?;
            step(&var, &mut low, &grad, &mut direction, &config, 1.)?;
            assert_eq!(var.to_dtype(DType::F32)?.to_vec1::<f32>()?, [0.375, -2.3125]);
        }
        Ok(())
    }
}
