//! [`Sgd`] against `torch.optim.SGD`, and its handling of invalid input.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use serde_json::Value;
use training::{Sgd, SgdConfig};

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

#[test]
fn follows_pytorch_step_by_step() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/sgd.json")).unwrap();
    let cases = fixture["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 16);
    for case in cases {
        let (dtype, tolerance) =
            if case["dtype"] == "float64" { (DType::F64, 1e-14) } else { (DType::F32, 3e-7) };
        let number = |name: &str| case[name].as_f64().unwrap();
        let config = SgdConfig {
            learning_rate: fixture["learning_rate"].as_f64().unwrap(),
            momentum: number("momentum"),
            dampening: number("dampening"),
            weight_decay: number("weight_decay"),
            nesterov: case["nesterov"].as_bool().unwrap(),
        };
        let var = Var::from_tensor(&tensor(&floats(&fixture["start"]), dtype)?)?;
        let mut sgd = Sgd::new(vec![var.clone()], config.clone())?;
        let gradients = fixture["gradients"].as_array().unwrap();
        for (step, (gradient, expected)) in
            gradients.iter().zip(case["after"].as_array().unwrap()).enumerate()
        {
            sgd.step(&store(&var, &tensor(&floats(gradient), dtype)?)?)?;
            let got = var.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            for (got, expected) in got.iter().zip(floats(expected)) {
                let gap = (got - expected).abs() / expected.abs().max(1.);
                assert!(gap <= tolerance, "{config:?} {dtype:?} step {step}: {got} for {expected}");
            }
        }
    }
    Ok(())
}

#[test]
fn plain_steps_equal_candles_to_the_bit() -> Result<()> {
    let start = Tensor::randn(0f32, 1., (7, 5), &Device::Cpu)?;
    let (ours, candles) = (Var::from_tensor(&start)?, Var::from_tensor(&start.copy()?)?);
    let mut sgd = Sgd::new(vec![ours.clone()], SgdConfig { learning_rate: 0.1, ..SgdConfig::default() })?;
    let mut candle_sgd = candle_nn::SGD::new(vec![candles.clone()], 0.1)?;
    for _ in 0..5 {
        let grad = Tensor::randn(0f32, 1., (7, 5), &Device::Cpu)?;
        sgd.step(&store(&ours, &grad)?)?;
        candle_sgd.step(&store(&candles, &grad)?)?;
        assert_eq!(ours.to_vec2::<f32>()?, candles.to_vec2::<f32>()?);
    }
    Ok(())
}

#[test]
fn a_transposed_gradient_is_read_in_the_right_order() -> Result<()> {
    let var = Var::zeros((2, 3), DType::F32, &Device::Cpu)?;
    let grad = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?.t()?;
    assert!(!grad.is_contiguous());
    let mut sgd =
        Sgd::new(vec![var.clone()], SgdConfig { learning_rate: 1., momentum: 0.5, ..SgdConfig::default() })?;
    sgd.step(&store(&var, &grad)?)?;
    assert_eq!(var.to_vec2::<f32>()?, [[-1., -3., -5.], [-2., -4., -6.]]);
    Ok(())
}

#[test]
fn a_parameter_without_a_gradient_stays() -> Result<()> {
    let (used, unused) = (Var::new(&[1f32], &Device::Cpu)?, Var::new(&[1f32], &Device::Cpu)?);
    let config = SgdConfig { learning_rate: 1., momentum: 0.9, weight_decay: 0.1, ..SgdConfig::default() };
    let mut sgd = Sgd::new(vec![unused.clone(), used.clone()], config)?;
    sgd.step(&store(&used, &Tensor::new(&[1f32], &Device::Cpu)?)?)?;
    assert_eq!(unused.to_vec1::<f32>()?, [1.]);
    assert_ne!(used.to_vec1::<f32>()?, [1.]);
    Ok(())
}

#[test]
fn the_parameter_keeps_its_memory() -> Result<()> {
    // A view made before the step sees its result, since the step does not allocate.
    let var = Var::new(&[1f32, 2.], &Device::Cpu)?;
    let view = var.as_detached_tensor();
    let mut sgd = Sgd::new(vec![var.clone()], SgdConfig { learning_rate: 1., ..SgdConfig::default() })?;
    sgd.step(&store(&var, &Tensor::new(&[1f32, 1.], &Device::Cpu)?)?)?;
    assert_eq!(view.to_vec1::<f32>()?, [0., 1.]);
    Ok(())
}

#[test]
fn a_gradient_of_another_shape_is_refused() -> Result<()> {
    let var = Var::new(&[1f32, 2.], &Device::Cpu)?;
    let mut sgd = Sgd::new(vec![var.clone()], SgdConfig::default())?;
    let error = sgd.step(&store(&var, &Tensor::new(&[1f32], &Device::Cpu)?)?).unwrap_err().to_string();
    assert!(error.contains("parameter 0") && error.contains("[1]") && error.contains("[2]"), "{error}");
    Ok(())
}

#[test]
fn configurations_that_make_no_sense_are_refused() {
    let nothing = SgdConfig::default();
    for (config, field) in [
        (SgdConfig { learning_rate: f64::NAN, ..nothing.clone() }, "learning_rate"),
        (SgdConfig { learning_rate: -0.1, ..nothing.clone() }, "learning_rate"),
        (SgdConfig { learning_rate: f64::INFINITY, ..nothing.clone() }, "learning_rate"),
        (SgdConfig { momentum: -0.1, ..nothing.clone() }, "momentum"),
        (SgdConfig { weight_decay: f64::NAN, ..nothing.clone() }, "weight_decay"),
        (SgdConfig { dampening: f64::NAN, ..nothing.clone() }, "dampening"),
        (SgdConfig { nesterov: true, ..nothing.clone() }, "momentum"),
        (SgdConfig { nesterov: true, momentum: 0.9, dampening: 0.1, ..nothing.clone() }, "dampening"),
    ] {
        let error = Sgd::new(vec![], config.clone()).unwrap_err().to_string();
        assert!(error.starts_with("Sgd: ") && error.contains(field), "{config:?}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
    let mut sgd = Sgd::new(vec![], nothing).unwrap();
    sgd.set_learning_rate(f64::NAN);
    let grads = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap().backward().unwrap();
    assert!(sgd.step(&grads).is_err());
}
