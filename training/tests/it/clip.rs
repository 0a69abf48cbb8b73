//! [`clip_grad_norm`] against `torch.nn.utils.clip_grad_norm_`, and its handling of invalid input.

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use serde_json::Value;
use training::{Error, Result, clip_grad_norm, grad_norm};

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Variables, and a store with these gradients.
fn gradients(values: &[Vec<f32>]) -> Result<(Vec<Var>, GradStore)> {
    let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu)?.backward()?;
    let mut vars = vec![];
    for values in values {
        let var = Var::zeros(values.len(), DType::F32, &Device::Cpu)?;
        grads.insert(&var, Tensor::new(&values[..], &Device::Cpu)?);
        vars.push(var);
    }
    Ok((vars, grads))
}

#[test]
fn norms_and_gradients_are_pytorchs() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/clip.json")).unwrap();
    for case in fixture["cases"].as_array().unwrap() {
        let lists = |name: &str| case[name].as_array().unwrap().iter().map(floats).collect::<Vec<_>>();
        let (vars, mut grads) = gradients(&lists("gradients"))?;
        let norm = clip_grad_norm(&mut grads, &vars, case["max_norm"].as_f64().unwrap())?;
        let expected = case["norm"].as_f64().unwrap();
        assert!((norm - expected).abs() <= 1e-6 * expected, "{norm} for {expected}");
        for (var, expected) in vars.iter().zip(lists("clipped")) {
            for (got, expected) in grads.get(var).unwrap().to_vec1::<f32>()?.iter().zip(expected) {
                assert!((got - expected).abs() <= 1e-6 * expected.abs(), "{got} for {expected}");
            }
        }
    }
    Ok(())
}

#[test]
fn what_is_not_finite_is_named_and_changes_nothing() -> Result<()> {
    for bad in [f32::NAN, f32::INFINITY] {
        let (vars, mut grads) = gradients(&[vec![1., 2.], vec![3., bad]])?;
        let error = clip_grad_norm(&mut grads, &vars, 1.0).unwrap_err();
        assert!(matches!(error, Error::NotFinite { index: 1, .. }), "{error}");
        assert_eq!(grads.get(&vars[0]).unwrap().to_vec1::<f32>()?, [1., 2.]);
    }
    Ok(())
}

#[test]
fn squares_beyond_f32_are_no_infinity() -> Result<()> {
    let (vars, grads) = gradients(&[vec![3e30], vec![4e30]])?;
    assert!((grad_norm(&grads, &vars)? / 5e30 - 1.0).abs() < 1e-6);
    let (vars, grads) = gradients(&[vec![3e-30, 4e-30]])?;
    assert!((grad_norm(&grads, &vars)? / 5e-30 - 1.0).abs() < 1e-6);
    Ok(())
}

#[test]
fn a_variable_listed_twice_counts_once_and_one_without_a_gradient_not() -> Result<()> {
    let (mut vars, mut grads) = gradients(&[vec![3., 4.]])?;
    vars.push(vars[0].clone());
    vars.push(Var::zeros(3, DType::F32, &Device::Cpu)?);
    assert_eq!(clip_grad_norm(&mut grads, &vars, 2.5)?, 5.0);
    assert!((grad_norm(&grads, &vars)? - 2.5).abs() < 1e-5);
    Ok(())
}

#[test]
fn every_layout_and_dtype_has_its_norm() -> Result<()> {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        let var = Var::zeros((2, 2), dtype, &Device::Cpu)?;
        let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu)?.backward()?;
        let wide = Tensor::new(&[[1f32, 9., 2.], [2., 9., 4.]], &Device::Cpu)?.to_dtype(dtype)?;
        grads.insert(&var, Tensor::cat(&[wide.narrow(1, 0, 1)?, wide.narrow(1, 2, 1)?], 1)?.t()?);
        assert_eq!(grad_norm(&grads, &[var])?, 5.0);
    }
    Ok(())
}

#[test]
fn a_bound_that_makes_no_sense_is_refused() -> Result<()> {
    let (vars, mut grads) = gradients(&[vec![3., 4.]])?;
    for bound in [-1.0, f64::NAN] {
        assert!(clip_grad_norm(&mut grads, &vars, bound).is_err());
    }
    assert_eq!(clip_grad_norm(&mut grads, &vars, f64::INFINITY)?, 5.0);
    Ok(())
}
