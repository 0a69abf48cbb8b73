//! Results of one process, compared with transformers on the same folders.

use crate::common::{Expected, FOLDERS, Trainer, assert_losses, best, folder, gap};
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarMap;
use models::{Cache, CausalLm, Weights};
use ops::{Balance, BalanceConfig, BalanceLoss, EXPERT_CORRECTION, RowContext};
use training::build::Builder;
use training::{clip_grad_norm, named_vars};

fn load(name: &str, vars: &VarMap) -> (CausalLm, Weights) {
    let weights = Weights::folder(&folder(name)).unwrap();
    let builder = Builder::new(weights.vars(vars, DType::F32, &Device::Cpu));
    (CausalLm::new(weights.config(), &builder).unwrap(), weights)
}

#[test]
fn logits_are_transformers() -> Result<()> {
    for name in FOLDERS {
        let (model, _) = load(name, &VarMap::new());
        let expected = Expected::of(name);
        let logits = model.logits(expected.get("tokens"))?;
        let found = gap(&logits, expected.get("logits"));
        assert!(found < 1e-5, "{name}: {found} off");
    }
    Ok(())
}

/// Every operation of a model is one that the tape knows: nothing is left to candle's backward, whose gradients are the same.
#[test]
fn backward_knows_all_of_a_model() -> Result<()> {
    for name in FOLDERS {
        let [tokens, targets] = Expected::of(name).batches(0, 1).remove(0);
        for dtype in [DType::F32, DType::F64] {
            let (vars, weights) = (VarMap::new(), Weights::folder(&folder(name)).unwrap());
            let builder = Builder::new(weights.vars(&vars, dtype, &Device::Cpu));
            let model = CausalLm::new(weights.config(), &builder)?;
            let loss = model.loss(&tokens, &targets)?;
            assert!(ops::tape::knows(&loss), "{name} {dtype:?}");
            if dtype != DType::F64 {
                continue;
            }
            let (ours, candles) = (ops::backward(&loss)?, loss.backward()?);
            for (name_of, var) in named_vars(&vars) {
                let both = [&ours, &candles].map(|grads| grads.get(&var));
                if let [Some(ours), Some(candles)] = both {
                    assert!(gap(ours, candles) < 1e-12, "{name}: {name_of}");
                } else {
                    assert!(name_of.ends_with(EXPERT_CORRECTION), "{name}: {name_of}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn training_is_transformers() -> Result<()> {
    for name in FOLDERS {
        let vars = VarMap::new();
        let (model, weights) = load(name, &vars);
        let expected = Expected::of(name);
        let mut trainer = Trainer::new(named_vars(&vars), |name| weights.shapes()[name].len() > 1);
        let mut losses = Vec::new();
        for [tokens, targets] in expected.batches(0, 1) {
            let loss = model.loss(&tokens, &targets)?;
            let mut grads = loss.backward()?;
            let mut all = named_vars(&vars);
            all.retain(|(name, _)| !name.ends_with(EXPERT_CORRECTION));
            assert!(all.iter().all(|(_, var)| grads.get(var).is_some()), "{name}");
            let all: Vec<_> = all.into_iter().map(|(_, var)| var).collect();
            clip_grad_norm(&mut grads, &all, 1.0)?;
            trainer.step(&grads)?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        assert_losses(&losses, &expected.losses(), name);
    }
    Ok(())
}

/// With the loss that balances experts, as `transformers` adds it, and its sum.
#[test]
fn balanced_training_is_transformers() -> Result<()> {
    let all = candle_core::safetensors::load(folder("balance.safetensors"), &Device::Cpu)?;
    for (name, losses) in &all {
        let vars = VarMap::new();
        let (model, weights) = load(name, &vars);
        let experts = weights.config().experts.as_ref().unwrap().count;
        let mut trainer = Trainer::new(named_vars(&vars), |name| weights.shapes()[name].len() > 1);
        let (mut found, mut of_balance) = (Vec::new(), Vec::new());
        for [tokens, targets] in Expected::of(name).batches(0, 1) {
            let config =
                BalanceConfig { loss: Some(BalanceLoss::Batch), weight: 0.05, ..BalanceConfig::new(experts) };
            let balance = Balance::new(config);
            let context = RowContext { balance: Some(balance.clone()), ..RowContext::default() };
            let loss = context.scope(|| model.loss(&tokens, &targets))?;
            balance.end_forward()?;
            let mut grads = loss.backward()?;
            let all: Vec<_> = named_vars(&vars).into_iter().map(|(_, var)| var).collect();
            clip_grad_norm(&mut grads, &all, 1.0)?;
            trainer.step(&grads)?;
            found.push(loss.to_scalar::<f32>()?);
            of_balance.push(balance.loss()? as f32);
        }
        assert_losses(&found, &losses.i((.., 0))?.to_vec1()?, name);
        assert_losses(&of_balance, &losses.i((.., 1))?.to_vec1()?, &format!("{name}, balance"));
    }
    assert_eq!(all.len(), 3);
    Ok(())
}

#[test]
fn greedy_continuations_are_transformers() -> Result<()> {
    for name in FOLDERS {
        let (model, _) = load(name, &VarMap::new());
        let expected = Expected::of(name);
        let greedy: Vec<u32> = expected.get("greedy").to_dtype(DType::U32)?.flatten_all()?.to_vec1()?;
        let mut cache = Cache::new();
        let mut next = model.next_logits(expected.get("prompt"), &mut cache)?;
        for (place, expected) in greedy.iter().enumerate() {
            assert_eq!(best(&next), [*expected], "{name}, token {place}");
            next = model.next_logits(&Tensor::new(&[[*expected]], &Device::Cpu)?, &mut cache)?;
        }
        assert_eq!(cache.len(), 6 + greedy.len());
    }
    Ok(())
}
