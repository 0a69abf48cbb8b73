//! [`Muon`] against `torch.optim.Muon`, its rest against [`Adam`], and its handling of invalid input.

use std::collections::HashMap;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use serde_json::Value;
use training::{Adam, AdamConfig, AdjustRate, Muon, MuonConfig, OptimizerState};

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
}

fn store<'a>(all: impl IntoIterator<Item = (&'a Var, &'a Tensor)>) -> Result<GradStore> {
    let mut grads = Tensor::zeros(1, DType::F32, &Device::Cpu)?.backward()?;
    all.into_iter().for_each(|(var, grad)| drop(grads.insert(var, grad.clone())));
    Ok(grads)
}

fn furthest(got: &Tensor, expected: &Value) -> Result<f64> {
    let got = got.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    let expected = floats(expected);
    assert_eq!(got.len(), expected.len());
    Ok(got.iter().zip(expected).map(|(got, expected)| (got - expected).abs()).fold(0.0, f64::max))
}

fn config_of(case: &Value, learning_rate: &Value) -> MuonConfig {
    MuonConfig {
        learning_rate: learning_rate.as_f64().unwrap(),
        weight_decay: case["weight_decay"].as_f64().unwrap(),
        momentum: case["momentum"].as_f64().unwrap(),
        nesterov: case["nesterov"].as_bool().unwrap(),
        adjust: match case["adjust_lr_fn"].as_str().unwrap() {
            "original" => AdjustRate::Original,
            "match_rms_adamw" => AdjustRate::MatchRmsAdamW,
            _ => AdjustRate::SpectralUnclamped,
        },
        ..MuonConfig::default()
    }
}

#[test]
fn follows_pytorch_for_20_steps() -> Result<()> {
    let fixture: Value = serde_json::from_str(include_str!("../fixtures/muon.json")).unwrap();
    let kept: Vec<u64> = fixture["kept"].as_array().unwrap().iter().map(|x| x.as_u64().unwrap()).collect();
    assert_eq!(kept, [1, 10, 20]);
    let mut compared = 0;
    for matrix in fixture["matrices"].as_array().unwrap() {
        let shape: Vec<usize> = floats(&matrix["shape"]).iter().map(|x| *x as usize).collect();
        let tensor = |values: &Value, dtype| {
            Tensor::new(floats(values), &Device::Cpu)?.to_dtype(dtype)?.reshape(&shape[..])
        };
        for case in matrix["cases"].as_array().unwrap() {
            // With PyTorch's own iterations, in bf16, the difference is bf16's, after steps of 0.02.
            let (dtype, tolerance) = match case["dtype"].as_str().unwrap() {
                "float64" => (DType::F64, 1e-13),
                "float32" => (DType::F32, 3e-6),
                _ => (DType::F32, 4e-3),
            };
            let config = config_of(case, &fixture["learning_rate"]);
            let var = Var::from_tensor(&tensor(&matrix["start"], dtype)?)?;
            let mut muon = Muon::named([("w".to_string(), var.clone())], |_| true, config.clone())?;
            for (step, gradient) in matrix["gradients"].as_array().unwrap().iter().enumerate() {
                muon.step(&store([(&var, &tensor(gradient, dtype)?)])?)?;
                if let Some(at) = kept.iter().position(|kept| *kept == step as u64 + 1) {
                    let off = furthest(&var, &case["after"][at])?;
                    assert!(off <= tolerance, "{shape:?} {config:?} {dtype:?} step {step}: {off}");
                    compared += 1;
                }
            }
            let state = muon.state()?;
            assert_eq!(state[0].0, "w.momentum_buffer");
            assert!(furthest(&state[0].1, &case["momentum_buffer"])? <= 1e-6);
        }
    }
    assert_eq!(compared, 4 * 9 * 3);
    Ok(())
}

fn random(dims: &[usize], seed: usize) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    let numbers = (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f64 / 504.5 - 1.0);
    Tensor::from_iter(numbers.collect::<Vec<_>>(), &Device::Cpu)?.reshape(dims)
}

/// Matrices of experts in one parameter are stepped one by one.
#[test]
fn a_batch_of_matrices_is_each_of_them() -> Result<()> {
    let start = random(&[2, 4, 3], 1)?;
    let all = Var::from_tensor(&start)?;
    let each = [0, 1].map(|i| start.get(i).and_then(|one| Var::from_tensor(&one.copy()?)));
    let [first, second] = each;
    let (first, second) = (first?, second?);
    let config = MuonConfig::default();
    let mut together = Muon::new(vec![all.clone()], config.clone())?;
    let mut apart = Muon::new(vec![first.clone(), second.clone()], config)?;
    for seed in 2..5 {
        let grad = random(&[2, 4, 3], seed)?;
        together.step(&store([(&all, &grad)])?)?;
        apart.step(&store([(&first, &grad.get(0)?), (&second, &grad.get(1)?)])?)?;
    }
    let apart = Tensor::stack(&[first.as_tensor(), second.as_tensor()], 0)?.flatten_all()?;
    assert_eq!(all.flatten_all()?.to_vec1::<f64>()?, apart.to_vec1::<f64>()?);
    Ok(())
}

#[test]
fn the_rest_is_stepped_by_adamw_with_its_own_learning_rate() -> Result<()> {
    let adam = AdamConfig { learning_rate: 0.01, weight_decay: 0.1, ..AdamConfig::adamw() };
    let start = random(&[3], 1)?;
    let (matrix, bias) = (Var::from_tensor(&random(&[3, 3], 2)?)?, Var::from_tensor(&start)?);
    let alone = Var::from_tensor(&start.copy()?)?;
    let config = MuonConfig { learning_rate: 0.04, adam: adam.clone(), ..MuonConfig::default() };
    let named = [("fc.weight".to_string(), matrix.clone()), ("fc.bias".to_string(), bias.clone())];
    let mut muon = Muon::named(named, |name| name == "fc.weight", config)?.decaying(|_| false);
    let mut other = Adam::named([("b".to_string(), alone.clone())], adam)?.decaying(|_| false);
    for (seed, part) in [(3, 1.0), (4, 0.5), (5, 0.25)] {
        let (grad, of_matrix) = (random(&[3], seed)?, random(&[3, 3], seed)?);
        muon.set_learning_rate(0.04 * part);
        other.set_learning_rate(0.01 * part);
        muon.step_scaled(&store([(&bias, &grad), (&matrix, &of_matrix)])?, 0.5)?;
        other.step_scaled(&store([(&alone, &grad)])?, 0.5)?;
    }
    assert_eq!(bias.to_vec1::<f64>()?, alone.to_vec1::<f64>()?);
    let keys: Vec<String> = muon.state()?.into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["fc.weight.momentum_buffer", "fc.bias.step", "fc.bias.exp_avg", "fc.bias.exp_avg_sq"]);
    Ok(())
}

#[test]
fn saved_state_goes_on_to_the_bit_also_in_16_bits() -> Result<()> {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let vars = [random(&[4, 3], 1)?, random(&[3], 2)?]
            .map(|start| Var::from_tensor(&start.to_dtype(dtype).unwrap()));
        let [weight, bias] = vars;
        let (weight, bias) = (weight?, bias?);
        let config = MuonConfig { learning_rate: 0.01, ..MuonConfig::default() };
        let copies = [Var::from_tensor(&weight.copy()?)?, Var::from_tensor(&bias.copy()?)?];
        let mut whole = Muon::new(vec![weight.clone(), bias.clone()], config.clone())?;
        let step = |muon: &mut Muon, vars: [&Var; 2], seed: usize| {
            let grads = [random(&[4, 3], seed)?.to_dtype(dtype)?, random(&[3], seed)?.to_dtype(dtype)?];
            muon.step(&store(vars.into_iter().zip(&grads))?)
        };
        let mut first = Muon::new(copies.to_vec(), config.clone())?;
        for seed in 3..6 {
            step(&mut whole, [&weight, &bias], seed)?;
            step(&mut first, [&copies[0], &copies[1]], seed)?;
        }
        let state = first.state()?.into_iter().collect();
        let mut resumed = Muon::new(copies.to_vec(), config)?;
        resumed.load_state(&state)?;
        for seed in 6..9 {
            step(&mut whole, [&weight, &bias], seed)?;
            step(&mut resumed, [&copies[0], &copies[1]], seed)?;
        }
        for (one, other) in [(&weight, &copies[0]), (&bias, &copies[1])] {
            let bits = |var: &Var| var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
            assert_eq!(bits(one)?, bits(other)?, "{dtype:?}");
        }
    }
    Ok(())
}

/// `a` is a matrix, and `a.b` is not.
#[test]
fn a_name_may_be_the_beginning_of_another() -> Result<()> {
    let (matrix, rest) = (Var::from_tensor(&random(&[3, 2], 1)?)?, Var::from_tensor(&random(&[3], 2)?)?);
    let named = || [("a".to_string(), matrix.clone()), ("a.b".to_string(), rest.clone())];
    let make = || Muon::named(named(), |name| name == "a", MuonConfig::default());
    let mut muon = make()?;
    muon.step_scaled(&store([(&matrix, &random(&[3, 2], 3)?), (&rest, &random(&[3], 4)?)])?, 1.0)?;
    let state: HashMap<String, Tensor> = muon.state()?.into_iter().collect();
    let mut resumed = make()?;
    resumed.load_state(&state)?;
    let again: HashMap<String, Tensor> = resumed.state()?.into_iter().collect();
    assert_eq!(again.len(), 4);
    for (key, tensor) in &state {
        let flat = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        assert_eq!(flat(&again[key])?, flat(tensor)?, "{key}");
    }
    Ok(())
}

#[test]
fn what_makes_no_sense_is_refused() -> Result<()> {
    let nothing = MuonConfig::default();
    for (config, field) in [
        (MuonConfig { learning_rate: -0.1, ..nothing.clone() }, "learning_rate"),
        (MuonConfig { learning_rate: 0.0, ..nothing.clone() }, "learning_rate"),
        (MuonConfig { momentum: 1.0, ..nothing.clone() }, "momentum"),
        (MuonConfig { weight_decay: f64::NAN, ..nothing.clone() }, "weight_decay"),
        (MuonConfig { iterations: 0, ..nothing.clone() }, "iterations"),
        (MuonConfig { eps: -1.0, ..nothing.clone() }, "eps"),
    ] {
        let error = Muon::named([], |_| true, config).unwrap_err().to_string();
        assert!(error.starts_with(&format!("Muon: {field} is")), "{error}");
    }
    let bias = Var::from_tensor(&random(&[3], 1)?)?;
    let grads = store([(&bias, &random(&[3], 2)?)])?;
    let error = Muon::new(vec![bias.clone()], nothing.clone())?.step(&grads).unwrap_err().to_string();
    assert!(error.starts_with("Muon: no parameter is a matrix"), "{error}");
    let mut muon = Muon::named([("b".to_string(), bias.clone())], |_| true, nothing)?;
    let error = muon.step(&grads).unwrap_err().to_string();
    assert!(error.starts_with("Muon: parameter b of shape [3] is no matrix"), "{error}");
    assert_eq!(bias.to_vec1::<f64>()?, random(&[3], 1)?.to_vec1::<f64>()?);
    Ok(())
}

/// A gradient that does not fit changes nothing, whichever parameter it is of.
#[test]
fn a_step_that_fails_changes_nothing() -> Result<()> {
    let vars = ["a", "b", "c", "d"].map(|name| (name, Var::ones((2, 2), DType::F64, &Device::Cpu).unwrap()));
    let named = vars.iter().map(|(name, var)| ((*name).to_string(), var.clone()));
    let mut muon = Muon::named(named, |name| name < "c", MuonConfig::default())?;
    let (fits, does_not) =
        (Tensor::ones((2, 2), DType::F64, &Device::Cpu)?, Tensor::ones((2, 3), DType::F64, &Device::Cpu)?);
    for bad in 0..vars.len() {
        let all =
            vars.iter().enumerate().map(|(at, (_, var))| (var, if at == bad { &does_not } else { &fits }));
        let said = muon.step(&store(all)?).unwrap_err().to_string();
        assert!(said.contains("[2, 3]"), "{said}");
        for (name, var) in &vars {
            assert_eq!(var.to_vec2::<f64>()?, [[1.0; 2]; 2], "{name}, with a wrong gradient of {bad}");
        }
        assert!(muon.state()?.is_empty());
    }
    Ok(())
}
