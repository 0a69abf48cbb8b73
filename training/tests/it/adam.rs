//! [`Adam`] against `torch.optim.Adam` and `AdamW`, and its handling of invalid input.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use serde_json::Value;
use training::{Adam, AdamConfig, OptimizerState};

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

/// A gradient store with only this gradient.
fn store(var: &Var, grad: &Tensor) -> Result<GradStore> {
    let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu)?.backward()?;
    grads.insert(var, grad.clone());
    Ok(grads)
}

fn tensor(values: &[f64], dtype: DType) -> Result<Tensor> {
    Tensor::new(values, &Device::Cpu)?.to_dtype(dtype)
}

fn assert_close(got: &Tensor, expected: &Value, tolerance: f64, what: &str) -> Result<()> {
    let got = got.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    for (got, expected) in got.iter().zip(floats(expected)) {
        assert!((got - expected).abs() <= tolerance * expected.abs().max(1.), "{what}: {got} for {expected}");
    }
    Ok(())
}

#[test]
fn follows_pytorch_step_by_step() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/adam.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 12);
    for case in cases {
        let (dtype, tolerance) =
            if case["dtype"] == "float64" { (DType::F64, 1e-14) } else { (DType::F32, 3e-7) };
        let config = AdamConfig {
            learning_rate: fixture["learning_rate"].as_f64().unwrap(),
            beta1: case["betas"][0].as_f64().unwrap(),
            beta2: case["betas"][1].as_f64().unwrap(),
            eps: case["eps"].as_f64().unwrap(),
            weight_decay: case["weight_decay"].as_f64().unwrap(),
            decoupled_weight_decay: case["optimizer"] == "AdamW",
        };
        let var = Var::from_tensor(&tensor(&floats(&fixture["start"]), dtype)?)?;
        let mut adam = Adam::named([("w".to_string(), var.clone())], config.clone())?;
        let gradients = fixture["gradients"].as_array().unwrap();
        for (step, (gradient, expected)) in
            gradients.iter().zip(case["after"].as_array().unwrap()).enumerate()
        {
            adam.step(&store(&var, &tensor(&floats(gradient), dtype)?)?)?;
            assert_close(&var, expected, tolerance, &format!("{config:?} {dtype:?} step {step}"))?;
        }
        let state = adam.state()?;
        let names: Vec<_> = state.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["w.step", "w.exp_avg", "w.exp_avg_sq"]);
        assert_eq!(state[0].1.to_scalar::<i64>()?, 5);
        assert_close(&state[1].1, &case["exp_avg"], tolerance, "exp_avg")?;
        assert_close(&state[2].1, &case["exp_avg_sq"], tolerance, "exp_avg_sq")?;
    }
    Ok(())
}

#[test]
fn the_defaults_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/adam.json")).unwrap();
    for (case, config) in [(0, AdamConfig::default()), (4, AdamConfig::adamw())] {
        let case = &fixture["cases"][case];
        assert_eq!(floats(&case["betas"]), [config.beta1, config.beta2]);
        assert_eq!(case["eps"], config.eps);
        assert_eq!(case["weight_decay"], config.weight_decay);
        assert_eq!(case["optimizer"] == "AdamW", config.decoupled_weight_decay);
    }
    Ok(())
}

#[test]
fn parameters_without_gradients_and_whole_numbers_stay() -> Result<()> {
    let (used, unused) = (Var::new(&[[1f32, 2.]], &Device::Cpu)?, Var::new(&[1f32], &Device::Cpu)?);
    let whole = Var::new(&[1u32], &Device::Cpu)?;
    let mut adam = Adam::new(vec![whole, unused.clone(), used.clone()], AdamConfig::adamw())?;
    adam.step(&store(&used, &Tensor::new(&[[1f32], [1.]], &Device::Cpu)?.t()?)?)?;
    assert_eq!(unused.to_vec1::<f32>()?, [1.]);
    let names: Vec<_> = adam.state()?.into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["2.step", "2.exp_avg", "2.exp_avg_sq"]);
    let error = adam.step(&store(&used, &Tensor::new(&[1f32], &Device::Cpu)?)?).unwrap_err().to_string();
    assert!(error.contains("parameter 2") && error.contains("[1, 2]"), "{error}");
    Ok(())
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let nothing = AdamConfig::default();
    for (config, field) in [
        (AdamConfig { learning_rate: f64::NAN, ..nothing.clone() }, "learning_rate"),
        (AdamConfig { learning_rate: -0.1, ..nothing.clone() }, "learning_rate"),
        (AdamConfig { beta1: 1., ..nothing.clone() }, "beta1"),
        (AdamConfig { beta2: -0.1, ..nothing.clone() }, "beta2"),
        (AdamConfig { eps: f64::INFINITY, ..nothing.clone() }, "eps"),
        (AdamConfig { weight_decay: -1., ..nothing.clone() }, "weight_decay"),
    ] {
        let error = Adam::new(vec![], config.clone()).unwrap_err().to_string();
        assert!(error.starts_with("Adam: ") && error.contains(field) && !error.contains('\n'), "{error}");
    }
}
