//! Packed rows: loss and gradients of each family are those of the documents alone, and training is that of transformers.

use crate::common::{FOLDERS, Trainer, assert_losses, folder};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarMap;
use models::{CausalLm, Weights};
use ops::{Documents, backward};
use proptest::prelude::*;
use training::build::{Builder, Recompute};
use training::{clip_grad_norm, named_vars};

const LEN: usize = 24;

fn load(name: &str, dtype: DType, recompute: Recompute) -> (CausalLm, Vec<(String, Var)>) {
    let (weights, vars) = (Weights::folder(&folder(name)).unwrap(), VarMap::new());
    let builder = Builder::new(weights.vars(&vars, dtype, &Device::Cpu)).recomputing(recompute);
    (CausalLm::new(weights.config(), &builder).unwrap(), named_vars(&vars))
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// Rows of tokens, and targets of which some, and those of unused places, do not count.
fn batch(rows: &[Vec<u32>], seed: u64) -> (Tensor, Tensor) {
    let token = |at: u64| ((at * 37 + seed * 11 + at * at % 13) % 90) as u32;
    let tokens = Tensor::from_iter((0..(rows.len() * LEN) as u64).map(token), &Device::Cpu).unwrap();
    let targets = rows.iter().enumerate().flat_map(|(row, lengths)| {
        let used = lengths.iter().sum::<u32>() as usize;
        (0..LEN).map(move |place| match (row + place) % 5 != 0 && place < used {
            true => i64::from(token((row * LEN + place) as u64 + 1000)),
            false => -100,
        })
    });
    let targets = Tensor::from_iter(targets, &Device::Cpu).unwrap();
    let shape = (rows.len(), LEN);
    (tokens.reshape(shape).unwrap(), targets.reshape(shape).unwrap())
}

/// The sum of losses, and the gradients of it.
fn sums(
    model: &CausalLm,
    vars: &[(String, Var)],
    tokens: &Tensor,
    targets: &Tensor,
) -> Result<(f64, Vec<Vec<f64>>)> {
    let count = numbers(targets).into_iter().filter(|target| *target != -100.0).count();
    if count == 0 {
        return Ok((0.0, vars.iter().map(|(_, var)| vec![0.0; var.elem_count()]).collect()));
    }
    let loss = (model.loss(tokens, targets)? * count as f64)?;
    let grads = backward(&loss)?;
    let of = |(_, var): &(String, Var)| grads.get(var).map_or_else(|| vec![0.0; var.elem_count()], numbers);
    Ok((numbers(&loss)[0], vars.iter().map(of).collect()))
}

/// Compares packed rows with their documents alone.
fn compare(name: &str, dtype: DType, recompute: Recompute, rows: &[Vec<u32>], seed: u64) -> Result<()> {
    let (model, vars) = load(name, dtype, recompute);
    let (tokens, targets) = batch(rows, seed);
    let documents = Documents::new(rows.to_vec()).unwrap();
    let (packed, packed_grads) = documents.scope(|| sums(&model, &vars, &tokens, &targets))?;
    let mut alone = 0.0;
    let mut alone_grads: Vec<Vec<f64>> = packed_grads.iter().map(|grad| vec![0.0; grad.len()]).collect();
    for (row, lengths) in rows.iter().enumerate() {
        let mut first = 0;
        for len in lengths.iter().map(|len| *len as usize) {
            let part = |all: &Tensor| all.narrow(0, row, 1)?.narrow(1, first, len)?.contiguous();
            let (loss, grads) = sums(&model, &vars, &part(&tokens)?, &part(&targets)?)?;
            alone += loss;
            for (sum, own) in alone_grads.iter_mut().flatten().zip(grads.iter().flatten()) {
                *sum += own;
            }
            first += len;
        }
    }
    // f32 has seven digits of the largest number that is summed.
    let most = |top: f64| if dtype == DType::F64 { 1e-10 * top.max(1.0) } else { 1e-5 * top.max(1.0) };
    assert!((packed - alone).abs() < most(alone), "{name}, {rows:?}: {packed}, {alone} alone");
    for ((parameter, _), (packed, alone)) in vars.iter().zip(packed_grads.iter().zip(&alone_grads)) {
        let top = alone.iter().fold(0.0, |top: f64, x| top.max(x.abs()));
        let gap = packed.iter().zip(alone).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < most(top), "{name}, {rows:?}: the gradient of {parameter} is {gap} off, of {top}");
    }
    Ok(())
}

/// Documents of rows of `LEN` places.
fn rows() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let row = prop::collection::vec(prop_oneof![1u32..3, 1u32..LEN as u32 + 1], 0..9).prop_map(|lengths| {
        let fits = |room: &mut u32, len: u32| {
            let own = len.min(*room);
            *room -= own;
            Some(own)
        };
        lengths.into_iter().scan(LEN as u32, fits).filter(|len| *len > 0).collect()
    });
    prop::collection::vec(row, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn packed_rows_are_their_documents_alone(
        rows in rows(),
        seed in 0u64..100,
        recompute in prop::sample::select(vec![Recompute::None, Recompute::Units, Recompute::Selective]),
    ) {
        for name in FOLDERS {
            compare(name, DType::F64, recompute, &rows, seed).unwrap();
        }
    }
}

#[test]
fn packed_rows_are_their_documents_alone_in_f32() -> Result<()> {
    let rows = [vec![7, 1, 9, 4], vec![24], vec![1, 1, 20], vec![]];
    FOLDERS.iter().try_for_each(|name| compare(name, DType::F32, Recompute::None, &rows, 1))
}

/// Packed conversations, as in the script that made them: prompts do not count, and places behind the last document are unused.
#[test]
fn training_is_transformers() -> Result<()> {
    let expected = training::load_tensors(&folder("packed.safetensors"), &Device::Cpu).unwrap();
    for name in ["llama", "mistral", "qwen2", "qwen3", "gpt2"] {
        let (model, vars) = load(name, DType::F32, Recompute::None);
        let all: Vec<Var> = vars.iter().map(|(_, var)| var.clone()).collect();
        let matrices: Vec<&String> =
            vars.iter().filter(|(_, var)| var.rank() > 1).map(|(name, _)| name).collect();
        let mut trainer = Trainer::new(vars.clone(), |name| matrices.iter().any(|matrix| *matrix == name));
        let step = |step: usize| {
            let of = |what: &str| expected[what].get(step);
            let lengths = of("documents")?.to_vec2::<i64>()?.into_iter();
            let rows =
                lengths.map(|row| row.into_iter().filter(|len| *len > 0).map(|len| len as u32).collect());
            let documents = Documents::new(rows.collect::<Vec<Vec<u32>>>())?;
            let loss = documents.scope(|| model.loss(&of("tokens")?, &of("targets")?))?;
            let mut grads = loss.backward()?;
            clip_grad_norm(&mut grads, &all, 1.0)?;
            trainer.step(&grads)?;
            loss.to_scalar::<f32>()
        };
        let expected = expected[&format!("losses.{name}")].to_vec1()?;
        assert_losses(&(0..expected.len()).map(step).collect::<Result<Vec<f32>>>()?, &expected, name);
    }
    Ok(())
}

/// One token of one document changes the logits of this document from there on, and no others.
#[test]
fn a_changed_token_changes_its_document_alone() -> Result<()> {
    let rows = [vec![5, 1, 11, 4], vec![24]];
    let documents = Documents::new(rows.clone()).unwrap();
    for name in FOLDERS {
        let (model, _) = load(name, DType::F32, Recompute::None);
        let (tokens, _) = batch(&rows, 3);
        let logits = |tokens: &Tensor| documents.scope(|| model.logits(tokens));
        let before = logits(&tokens)?;
        for (place, end) in [(0, 5), (4, 5), (5, 6), (6, 17), (10, 17), (17, 21), (22, 23)] {
            let changed = tokens.flatten_all()?.copy()?;
            changed.slice_set(&Tensor::new(&[91u32], &Device::Cpu)?, 0, place)?;
            let differ = numbers(&(logits(&changed.reshape((2, LEN))?)? - &before)?.abs()?.max(2)?);
            // The rows of an expert have other places in its products, which are rounded otherwise there.
            let least = if model.config().experts.is_some() { 1e-5 } else { 0.0 };
            let changed: Vec<usize> = (0..2 * LEN).filter(|at| differ[*at] > least).collect();
            // Two layers with windows of 5 see 8 tokens back.
            let end = if name == "mistral" { end.min(place + 9) } else { end };
            assert_eq!(changed, (place..end).collect::<Vec<_>>(), "{name}: token {place}");
        }
    }
    Ok(())
}

#[test]
fn a_row_may_be_longer_than_the_models_positions_and_a_document_may_not() -> Result<()> {
    for name in ["gpt2", "llama", "qwen3"] {
        let (model, _) = load(name, DType::F32, Recompute::None);
        let tokens = Tensor::zeros((1, 80), DType::U32, &Device::Cpu)?;
        let said = |lengths: Vec<u32>| {
            let documents = Documents::new([lengths]).unwrap();
            documents.scope(|| model.logits(&tokens)).map_err(|error| error.to_string())
        };
        assert!(said(vec![16, 64]).is_ok(), "{name}");
        let said = said(vec![10, 65]).unwrap_err();
        assert!(said.contains("a document of 65 tokens is longer than the model's 64 positions"), "{said}");
    }
    Ok(())
}
