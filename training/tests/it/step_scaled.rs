//! `step_scaled` equals scaling and then stepping, to the bit, with any number of threads.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use training::internal::{clip_by_norm, clip_factor};
use training::{Adam, AdamConfig, Sgd, SgdConfig, grad_norm};

/// Numbers between -1 and 1.
fn numbers(seed: u64, count: usize) -> Vec<f64> {
    (0..count as u64).map(|at| ((at + 31 * seed) * 7919 % 1999) as f64 / 999.5 - 1.0).collect()
}

/// A parameter large enough for several threads and a small one, with the same numbers each time.
fn vars(dtype: DType) -> Result<Vec<Var>> {
    let of = |count: usize| {
        Var::from_tensor(&Tensor::from_vec(numbers(3, count), count, &Device::Cpu)?.to_dtype(dtype)?)
    };
    Ok(vec![of(70_001)?, of(5)?])
}

/// Gradients that include zeros of both signs.
fn grads(vars: &[Var], step: u64) -> Result<GradStore> {
    let mut grads = Tensor::zeros((), DType::F32, &Device::Cpu)?.backward()?;
    for var in vars {
        let count = var.elem_count();
        let mut numbers = numbers(10 + step, count);
        (numbers[1], numbers[2]) = (-0.0, 0.0);
        grads.insert(var, Tensor::from_vec(numbers, count, &Device::Cpu)?.to_dtype(var.dtype())?);
    }
    Ok(grads)
}

fn bits(vars: &[Var]) -> Result<Vec<u64>> {
    let numbers = |var: &Var| var.to_dtype(DType::F64)?.to_vec1::<f64>();
    Ok(vars.iter().map(numbers).collect::<Result<Vec<_>>>()?.concat().into_iter().map(f64::to_bits).collect())
}

trait Scaled: Optimizer {
    fn step_scaled(&mut self, grads: &GradStore, scale: f64) -> Result<()>;
}

impl Scaled for Adam {
    fn step_scaled(&mut self, grads: &GradStore, scale: f64) -> Result<()> {
        Adam::step_scaled(self, grads, scale)
    }
}

impl Scaled for Sgd {
    fn step_scaled(&mut self, grads: &GradStore, scale: f64) -> Result<()> {
        Sgd::step_scaled(self, grads, scale)
    }
}

/// Bits of the parameters after four clipped steps, with the factor passed to `step_scaled` or applied before the
/// step.
fn clipped<O: Scaled>(config: &O::Config, dtype: DType, on_the_way: bool) -> Result<Vec<u64>>
where
    O::Config: Clone,
{
    let vars = vars(dtype)?;
    let mut optimizer = O::new(vars.clone(), config.clone())?;
    for step in 0..4 {
        let mut grads = grads(&vars, step)?;
        let norm = grad_norm(&grads, &vars)?;
        // The last step does not clip.
        let max_norm = if step == 3 { 1e9 } else { 0.7 };
        if on_the_way {
            optimizer.step_scaled(&grads, clip_factor(norm, max_norm)?)?;
        } else {
            clip_by_norm(&mut grads, &vars, norm, max_norm)?;
            optimizer.step(&grads)?;
        }
    }
    bits(&vars)
}

fn check<O: Scaled>(config: &O::Config)
where
    O::Config: Clone + Send + Sync + std::fmt::Debug,
{
    let run = |threads, dtype, on_the_way| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| clipped::<O>(config, dtype, on_the_way)).unwrap()
    };
    // Not for f16 and bf16, which `step_scaled` scales in f32 without rounding.
    for dtype in [DType::F32, DType::F64] {
        let expected = run(1, dtype, false);
        for (threads, on_the_way) in [(1, true), (3, false), (3, true)] {
            assert!(
                run(threads, dtype, on_the_way) == expected,
                "{config:?} in {dtype:?} on {threads} threads"
            );
        }
    }
}

#[test]
fn a_factor_on_the_way_changes_no_bit() {
    let adam = AdamConfig { weight_decay: 0.1, ..AdamConfig::default() };
    [AdamConfig::adamw(), AdamConfig::default(), adam].iter().for_each(check::<Adam>);
    for (momentum, weight_decay, nesterov) in
        [(0.0, 0.0, false), (0.0, 0.1, false), (0.9, 0.1, true), (0.9, 0.0, false)]
    {
        check::<Sgd>(&SgdConfig { momentum, weight_decay, nesterov, ..SgdConfig::default() });
    }
}

#[test]
fn a_factor_that_is_no_number_is_refused() -> Result<()> {
    let vars = vars(DType::F32)?;
    let (before, grads) = (bits(&vars)?, grads(&vars, 0)?);
    for scale in [f64::NAN, f64::INFINITY] {
        let adam = Adam::new(vars.clone(), AdamConfig::default())?.step_scaled(&grads, scale).unwrap_err();
        let sgd = Sgd::new(vars.clone(), SgdConfig::default())?.step_scaled(&grads, scale).unwrap_err();
        assert!(
            adam.to_string().starts_with("Adam: scale is") && sgd.to_string().starts_with("Sgd: scale is")
        );
    }
    assert!(bits(&vars)? == before);
    assert!(clip_factor(f64::NAN, 1.0).is_err() && clip_factor(1.0, -1.0).is_err());
    assert_eq!(clip_factor(0.5, 1.0).unwrap(), 1.0);
    Ok(())
}
