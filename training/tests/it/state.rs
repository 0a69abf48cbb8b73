//! Saving and loading of optimizer state: a resumed optimizer takes the same steps to the bit, and state that does
//! not fit is refused.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use training::{Adam, AdamConfig, DeferredCopy, Error, OptimizerState, Result, Sgd, SgdConfig};

const DTYPES: [DType; 3] = [DType::F32, DType::F64, DType::BF16];

fn vars(dtype: DType) -> Result<Vec<(String, Var)>> {
    let var = |shape: &[usize]| Var::from_tensor(&Tensor::ones(shape, dtype, &Device::Cpu)?);
    Ok(vec![("fc.weight".into(), var(&[3, 2])?), ("fc.bias".into(), var(&[3])?)])
}

/// One step on a quadratic loss.
fn step(optimizer: &mut impl Optimizer, vars: &[(String, Var)]) -> Result<()> {
    let squares = |var: &Var| (var.sqr()? * 0.5)?.sum_all();
    let loss = (squares(&vars[0].1)? + squares(&vars[1].1)?)?;
    Ok(optimizer.backward_step(&loss)?)
}

fn numbers(vars: &[(String, Var)]) -> Result<Vec<f64>> {
    let mut all = vec![];
    for (_, var) in vars {
        all.extend(var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?);
    }
    Ok(all)
}

/// Two steps, a save and load through a safetensors file, and two more steps equal four steps without interruption.
fn goes_on<O: Optimizer + OptimizerState>(make: impl Fn(Vec<(String, Var)>) -> Result<O>) -> Result<()> {
    for dtype in DTYPES {
        let straight = vars(dtype)?;
        let mut optimizer = make(straight.clone())?;
        let broken = vars(dtype)?;
        let mut before = make(broken.clone())?;
        for _ in 0..2 {
            step(&mut optimizer, &straight)?;
            step(&mut before, &broken)?;
        }
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("optimizer.safetensors");
        let state: HashMap<String, Tensor> = before.state()?.into_iter().collect();
        candle_core::safetensors::save(&state, &file)?;
        let mut after = make(broken.clone())?;
        after.load_state(&candle_core::safetensors::load(&file, &Device::Cpu)?)?;
        for _ in 0..2 {
            step(&mut optimizer, &straight)?;
            step(&mut after, &broken)?;
        }
        assert_eq!(numbers(&straight)?, numbers(&broken)?);
    }
    Ok(())
}

#[test]
fn sgd_goes_on() -> Result<()> {
    let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, dampening: 0.1, ..SgdConfig::default() };
    goes_on(|vars| Sgd::named(vars, config.clone()))
}

#[test]
fn adam_goes_on() -> Result<()> {
    goes_on(|vars| Adam::named(vars, AdamConfig { learning_rate: 0.1, ..AdamConfig::adamw() }))
}

#[test]
fn a_saved_state_does_not_change_with_the_steps() -> Result<()> {
    let vars = vars(DType::F32)?;
    let mut sgd = Sgd::named(vars.clone(), SgdConfig { momentum: 0.9, ..SgdConfig::default() })?;
    assert!(sgd.state()?.is_empty());
    step(&mut sgd, &vars)?;
    let state = sgd.state()?;
    let before = state[0].1.to_vec2::<f32>()?;
    step(&mut sgd, &vars)?;
    assert_eq!(state[0].1.to_vec2::<f32>()?, before);
    Ok(())
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() -> Result<()> {
    let vars = vars(DType::F32)?;
    let mut adam = Adam::named(vars.clone(), AdamConfig::default())?;
    step(&mut adam, &vars)?;
    let good: HashMap<String, Tensor> = adam.state()?.into_iter().collect();
    let changed = |key: &str, tensor: Option<Tensor>| {
        let mut state = good.clone();
        match tensor {
            Some(tensor) => state.insert(key.into(), tensor),
            None => state.remove(key),
        };
        state
    };
    let tensor = |dtype| Tensor::zeros(4, dtype, &Device::Cpu);
    let other = changed("head.weight.exp_avg", Some(tensor(DType::F32)?));
    let lacking = changed("fc.bias.exp_avg_sq", None);
    let misshapen = changed("fc.bias.exp_avg", Some(tensor(DType::F32)?));
    let without_step = changed("fc.bias.step", None);
    for (state, key) in [
        (other, "head.weight.exp_avg"),
        (lacking, "fc.bias.exp_avg_sq"),
        (misshapen, "fc.bias.exp_avg"),
        (without_step, "fc.bias.exp_avg"),
    ] {
        let error = adam.load_state(&state).unwrap_err();
        let message = error.to_string();
        assert!(message.contains(&format!("`{key}`")) && !message.contains('\n'), "{message}");
        assert_eq!(adam.state()?[1].1.to_vec2::<f32>()?, good["fc.weight.exp_avg"].to_vec2::<f32>()?);
    }
    let error =
        adam.load_state(&changed("fc.bias.exp_avg", Some(Tensor::zeros(3, DType::F64, &Device::Cpu)?)));
    assert!(matches!(error, Err(Error::StateMismatch { got_dtype: DType::F64, .. })));
    let sgd = Sgd::named(vars, SgdConfig::default())?.load_state(&good);
    assert!(matches!(sgd, Err(Error::UnknownState { .. })));
    Ok(())
}

#[test]
fn an_empty_state_starts_anew() -> Result<()> {
    let vars = vars(DType::F32)?;
    let mut adam = Adam::named(vars.clone(), AdamConfig::default())?;
    step(&mut adam, &vars)?;
    adam.load_state(&HashMap::new())?;
    assert!(adam.state()?.is_empty());
    Ok(())
}

#[test]
fn two_of_a_name_are_refused() -> Result<()> {
    let mut vars = vars(DType::F32)?;
    vars[1].0 = "fc.weight".into();
    let error = Sgd::named(vars, SgdConfig::default()).unwrap_err();
    assert!(
        matches!(error, Error::DuplicateName { .. }) && error.to_string().contains("fc.weight"),
        "{error}"
    );
    Ok(())
}

/// A copy made after further steps has the state of the time when it was requested.
#[test]
fn what_is_copied_later_is_of_now() -> Result<()> {
    for dtype in DTYPES {
        let vars = vars(dtype)?;
        let mut adam = Adam::named(vars.clone(), AdamConfig::default())?;
        let mut sgd = Sgd::named(vars.clone(), SgdConfig { momentum: 0.9, ..SgdConfig::default() })?;
        step(&mut adam, &vars)?;
        step(&mut sgd, &vars)?;
        let all = [&adam as &dyn OptimizerState, &sgd].map(|optimizer| {
            let state = optimizer.state().unwrap();
            (state, optimizer.state_later().unwrap())
        });
        step(&mut adam, &vars)?;
        step(&mut sgd, &vars)?;
        for (expected, later) in all {
            assert_eq!(expected.len(), later.len());
            for ((key, expected), (later_key, later)) in expected.into_iter().zip(later) {
                assert_eq!((later.dims(), later.dtype()), (expected.dims(), expected.dtype()));
                let got = numbers(&[(key.clone(), Var::from_tensor(&later.copy()?)?)])?;
                assert_eq!((later_key, got), (key.clone(), numbers(&[(key, Var::from_tensor(&expected)?)])?));
            }
        }
    }
    Ok(())
}

/// A copy is made over a spare tensor that fits, in place, and leaves any other as it is.
#[test]
fn a_spare_tensor_is_overwritten() -> Result<()> {
    for dtype in DTYPES {
        let vars = vars(dtype)?;
        let mut adam = Adam::named(vars.clone(), AdamConfig::default())?;
        step(&mut adam, &vars)?;
        let (_, var) = &vars[0];
        let elements = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>();
        let ones = |len, dtype| Tensor::ones(len, dtype, &Device::Cpu);
        let (_, mean) = adam.state()?.remove(1);
        let sources = || -> Result<_> {
            let later = adam.state_later()?.remove(1).1;
            Ok([
                (var.as_detached_tensor(), DeferredCopy::new(var.as_detached_tensor())),
                (mean.clone(), later),
            ])
        };
        let count = var.elem_count();
        for range in [0..count, 0..count - 1, 1..count] {
            let len = range.len();
            let wanted =
                |expected: &Tensor| Ok::<_, candle_core::Error>(elements(expected)?[range.clone()].to_vec());
            for (expected, later) in sources()? {
                let later = if len == count { later } else { later.range(range.clone())? };
                let spare = ones(len, later.dtype())?;
                let (dims, wanted) = (later.dims().to_vec(), wanted(&expected)?);
                let copy = later.copy_over(Some(spare.clone()))?;
                assert_eq!((copy.dims(), elements(&copy)?), (&dims[..], wanted.clone()));
                assert_eq!(elements(&spare)?, wanted);
            }
            for other in [ones(len + 1, dtype)?, ones(len, DType::U8)?] {
                for (expected, later) in sources()? {
                    let copy = later.range(range.clone())?.copy_over(Some(other.clone()))?;
                    assert_eq!(elements(&copy)?, wanted(&expected)?);
                    assert!(elements(&other)?.iter().all(|element| *element == 1.0));
                }
            }
        }
        assert!(sources()?.into_iter().all(|(_, later)| later.range(1..count + 1).is_err()));
    }
    Ok(())
}

#[test]
fn one_variable_given_twice_is_refused() -> Result<()> {
    let mut vars = vars(DType::F32)?;
    vars.push(("head.weight".into(), vars[0].1.clone()));
    let twice = [vars[1].1.clone(), vars[1].1.clone()];
    let named = Adam::named(vars, AdamConfig::default()).unwrap_err();
    assert!(matches!(named, Error::DuplicateVariable { .. }), "{named}");
    assert!(
        named.to_string().starts_with("Adam: parameters `fc.weight` and `head.weight` are the same variable")
    );
    let indexed = Sgd::new(twice.to_vec(), SgdConfig::default()).unwrap_err().to_string();
    assert!(indexed.starts_with("Sgd: parameters `0` and `1` are the same variable"), "{indexed}");
    // Integers are not trained.
    let ids = Var::new(&[1i64], &Device::Cpu)?;
    Sgd::new(vec![ids.clone(), ids], SgdConfig::default())?;
    Ok(())
}
