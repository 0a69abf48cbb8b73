//! Parameters of 16 bits: what they have no room for is kept, so that small steps add up as those of f32 do.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::Optimizer;
use ops::{Linear, backward, mse};
use training::{Adam, AdamConfig, OptimizerState, Sgd, SgdConfig};

/// The same numbers in every run, from minus `scale` to `scale`.
fn numbers(seed: u32, dims: &[usize], scale: f32) -> Result<Tensor> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    let all: Vec<f32> = std::iter::repeat_with(next).take(dims.iter().product()).collect();
    Tensor::from_vec(all, dims, &Device::Cpu)
}

fn wide(x: &Tensor) -> Result<Vec<f32>> {
    x.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

fn named(var: &Var) -> [(String, Var); 1] {
    [("w".into(), var.clone())]
}

/// A store of gradients with one.
fn gradient_of(var: &Var, gradient: &Tensor) -> Result<GradStore> {
    let mut grads = var.as_tensor().sum_all()?.backward()?;
    grads.insert(var, gradient.clone());
    Ok(grads)
}

fn sgd(var: &Var) -> Result<Sgd> {
    let config = SgdConfig { learning_rate: 1e-5, momentum: 0.9, weight_decay: 0.1, ..SgdConfig::default() };
    Ok(Sgd::named(named(var), config)?)
}

fn adam(var: &Var) -> Result<Adam> {
    Ok(Adam::named(named(var), AdamConfig { learning_rate: 1e-5, ..AdamConfig::adamw() })?)
}

fn plain_sgd(var: &Var) -> Result<Sgd> {
    Ok(Sgd::named(named(var), SgdConfig { learning_rate: 1e-5, ..SgdConfig::default() })?)
}

/// With the same gradients, the parameter is that of f32, rounded. Goes on from saved state in between.
fn equals_f32<O: Optimizer + OptimizerState>(make: fn(&Var) -> Result<O>) -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        // Matrix weights, and those of a norm; several blocks.
        let start =
            Tensor::cat(&[numbers(1, &[20_000], 0.02)?, numbers(2, &[20_000], 1.0)?], 0)?.to_dtype(dtype)?;
        let (narrow, exact) = (Var::from_tensor(&start)?, Var::from_tensor(&start.to_dtype(DType::F32)?)?);
        let (mut of_narrow, mut of_exact) = (make(&narrow)?, make(&exact)?);
        for step in 0..60 {
            let gradient = numbers(step / 8, &[40_000], 1.0)?;
            of_exact.step(&gradient_of(&exact, &gradient)?)?;
            of_narrow.step(&gradient_of(&narrow, &gradient)?)?;
            if step == 30 {
                let state = of_narrow.state()?.into_iter().collect();
                of_narrow = make(&narrow)?;
                of_narrow.load_state(&state)?;
            }
        }
        let (found, exact) = (wide(&narrow)?, wide(&exact)?);
        let rounded = wide(&Tensor::new(&exact[..], &Device::Cpu)?.to_dtype(dtype)?)?;
        // Only where an f32 is half between two numbers of 16 bits may the other one be taken.
        let others = found.iter().zip(&rounded).filter(|(found, rounded)| found != rounded).count();
        assert!(others < 10, "{dtype:?}: {others} of {} differ", found.len());
        let moved = found.iter().zip(wide(&start)?).filter(|(found, start)| *found != start).count();
        assert!(moved > 10_000, "{dtype:?}: {moved} moved");
    }
    Ok(())
}

#[test]
fn steps_of_16_bits_are_those_of_f32() -> Result<()> {
    equals_f32(adam)?;
    equals_f32(sgd)?;
    equals_f32(plain_sgd)
}

/// The distances that the parameters of a small model go at a small learning rate.
fn trained(dtype: DType) -> Result<Vec<f32>> {
    let var = |seed, dims: &[usize], scale| Var::from_tensor(&numbers(seed, dims, scale)?.to_dtype(dtype)?);
    let ones = Var::from_tensor(&Tensor::ones(32, dtype, &Device::Cpu)?)?;
    let vars = [var(1, &[32, 16], 0.25)?, var(2, &[8, 32], 0.2)?, ones];
    let start = vars.each_ref().map(|var| wide(var));
    let layers = [0, 1].map(|place| Linear::new(vars[place].as_tensor().clone(), None));
    let (x, y) = (numbers(3, &[64, 16], 1.0)?.to_dtype(dtype)?, numbers(4, &[64, 8], 1.0)?.to_dtype(dtype)?);
    let config = AdamConfig { learning_rate: 1e-5, ..AdamConfig::default() };
    let mut adam = Adam::new(vars.to_vec(), config)?;
    for _ in 0..100 {
        let hidden = layers[0].forward(&x)?.broadcast_mul(vars[2].as_tensor())?.relu()?;
        adam.step(&backward(&mse(&layers[1].forward(&hidden)?, &y)?)?)?;
    }
    let mut gone = vec![];
    for (var, start) in vars.iter().zip(start) {
        gone.extend(wide(var)?.iter().zip(start?).map(|(now, start)| now - start));
    }
    Ok(gone)
}

/// Without what is kept, 9 of 10 of them never move, and those of the scale none.
#[test]
fn a_model_of_bf16_goes_where_that_of_f32_goes() -> Result<()> {
    let (exact, found) = (trained(DType::F32)?, trained(DType::BF16)?);
    // f32's model begins at f32 numbers, so that only distances compare. Each is rounded once: their mean is not.
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum::<f64>();
    let along = dot(&exact, &found) / dot(&exact, &exact);
    assert!((0.9..1.1).contains(&along), "{along}");
    Ok(())
}

/// State of another dtype, such as that of a run in bf16 that goes on in f32, is no error.
#[test]
fn a_run_goes_on_in_another_dtype() -> Result<()> {
    let narrow = Var::from_tensor(&numbers(1, &[40], 1.0)?.to_dtype(DType::BF16)?)?;
    let mut before = adam(&narrow)?;
    before.step(&gradient_of(&narrow, &numbers(2, &[40], 1.0)?)?)?;
    let state = before.state()?.into_iter().collect::<std::collections::HashMap<_, _>>();
    assert_eq!(state["w.low_bits"].dtype(), DType::BF16);
    assert_eq!(before.state_bytes(), 40 * (4 + 4 + 2));
    for dtype in [DType::F32, DType::F16] {
        let mut after = adam(&Var::from_tensor(&narrow.to_dtype(dtype)?)?)?;
        after.load_state(&state)?;
        assert!(!after.state()?.iter().any(|(key, _)| key == "w.low_bits"));
    }
    Ok(())
}
