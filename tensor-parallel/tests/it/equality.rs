//! Outputs, losses, gradients and weights equal those of a single process with all weights, over 100 steps of training.

use std::collections::BTreeMap;

use crate::common::{Dense, Part, batch, gap, gradients, on_mesh, sizes, values, whole};
use candle_core::{DType, Tensor};
use candle_nn::Optimizer;
use tensor_parallel::{LanguageModel, TensorParallel, TensorParallelConfig, Weights};
use training::{Adam, AdamConfig, Sgd, SgdConfig};

const STEPS: usize = 100;
const SEED: u64 = 11;
/// Steps whose gradients are compared.
const LOOKED_AT: [usize; 3] = [0, 50, STEPS - 1];

/// Results of a run.
struct Seen<T> {
    losses: Vec<f64>,
    gradients: Vec<T>,
    weights: T,
    logits: Tensor,
}

fn number(loss: &Tensor) -> f64 {
    loss.to_dtype(DType::F64).unwrap().to_scalar().unwrap()
}

fn optimizer(
    vars: Vec<(String, candle_core::Var)>,
    dtype: DType,
) -> Box<dyn FnMut(&candle_core::backprop::GradStore)> {
    // Adam divides gradients by their magnitude, so in f32 it would amplify rounding errors of tiny gradients.
    if dtype == DType::F64 {
        let mut adam = Adam::named(vars, AdamConfig::default()).unwrap();
        return Box::new(move |gradients| adam.step(gradients).unwrap());
    }
    let config = SgdConfig { learning_rate: 0.05, momentum: 0.9, ..SgdConfig::default() };
    let mut sgd = Sgd::named(vars, config).unwrap();
    Box::new(move |gradients| sgd.step(gradients).unwrap())
}

fn dense(dp: usize, dtype: DType) -> Seen<BTreeMap<String, Tensor>> {
    let model = Dense::new(&sizes(), SEED, dtype);
    let mut step_with = optimizer(model.named_vars(), dtype);
    let (mut losses, mut seen) = (vec![], vec![]);
    for step in 0..STEPS {
        let loss = model.loss(step, dp);
        let gradients = loss.backward().unwrap();
        losses.push(number(&loss));
        if LOOKED_AT.contains(&step) {
            seen.push(model.gradients(&gradients));
        }
        step_with(&gradients);
    }
    let logits = model.logits(&batch(&sizes(), 0, 0).0).unwrap().detach();
    Seen { losses, gradients: seen, weights: model.values(), logits }
}

fn parallel(dp: usize, tp: usize, sequence_parallel: bool, dtype: DType) -> Vec<Seen<Vec<Part>>> {
    on_mesh(dp, tp, |mesh| {
        let config = TensorParallelConfig { sequence_parallel, dtype, ..TensorParallelConfig::default() };
        let model = |builder| LanguageModel::new(builder, &sizes());
        let parallel = TensorParallel::new(mesh, &config, &Weights::seed(SEED), model)?;
        let mut step_with = optimizer(parallel.named_vars(), dtype);
        let (mut losses, mut seen) = (vec![], vec![]);
        for step in 0..STEPS {
            let (tokens, next) = batch(&sizes(), step, mesh.axis("dp")?.rank());
            let loss = parallel.model()?.loss(&tokens, &next)?;
            let grads = parallel.backward(&loss)?;
            losses.push(number(&loss));
            if LOOKED_AT.contains(&step) {
                seen.push(gradients(&parallel, &grads));
            }
            step_with(&grads);
        }
        let logits = parallel.model()?.logits(&batch(&sizes(), 0, 0).0)?.detach();
        Ok(Seen { losses, gradients: seen, weights: values(&parallel), logits })
    })
}

/// Compares a mesh with a single process.
fn check(dp: usize, tp: usize, sequence_parallel: bool, dtype: DType, tolerance: f64) {
    let what = format!("dp {dp}, tp {tp}, sequence parallel {sequence_parallel}, {dtype:?}");
    let (expected, ranks) = (dense(dp, dtype), parallel(dp, tp, sequence_parallel, dtype));
    for step in 0..STEPS {
        // Rank r has rank r / tp along `dp`, and rank r % tp along `tp`.
        let of_dp = |rank: usize| ranks[rank * tp].losses[step];
        let mean = (0..dp).map(of_dp).sum::<f64>() / dp as f64;
        let error = (mean - expected.losses[step]).abs() / expected.losses[step];
        assert!(error < tolerance, "{what}: loss of step {step}: {mean}, {}", expected.losses[step]);
    }
    let compare = |kind: &str, parts: Vec<Vec<Part>>, expected: &BTreeMap<String, Tensor>| {
        let got = whole(&parts);
        assert_eq!(got.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (name, tensor) in &got {
            let (got, expected) = look(name, tensor, &expected[name]);
            let error = gap(&got, &expected);
            assert!(error < tolerance, "{what}: {kind} of {name}: {error:.1e}");
        }
    };
    for replica in ranks.chunks(tp) {
        for (place, step) in LOOKED_AT.iter().enumerate() {
            let parts = replica.iter().map(|rank| rank.gradients[place].clone()).collect();
            compare(&format!("gradient at step {step}"), parts, &expected.gradients[place]);
        }
        compare("value", replica.iter().map(|rank| rank.weights.clone()).collect(), &expected.weights);
        for rank in replica {
            let error = gap(&rank.logits, &expected.logits);
            assert!(error < tolerance, "{what}: logits: {error:.1e}");
        }
    }
}

/// Returns both tensors, without the bias of keys: its gradient is zero except for rounding, as it adds the same value to all
/// of a token's attention scores.
fn look(name: &str, got: &Tensor, expected: &Tensor) -> (Tensor, Tensor) {
    if !name.ends_with("qkv.bias") {
        return (got.clone(), expected.clone());
    }
    let d = got.dim(0).unwrap() / 3;
    let others =
        |t: &Tensor| Tensor::cat(&[t.narrow(0, 0, d).unwrap(), t.narrow(0, 2 * d, d).unwrap()], 0).unwrap();
    (others(got), others(expected))
}

#[test]
fn on_one_rank() {
    check(1, 1, false, DType::F32, 1e-5);
    check(1, 1, true, DType::F32, 1e-5);
    check(2, 1, false, DType::F64, 1e-9);
}

#[test]
fn on_two_ranks() {
    for sequence_parallel in [false, true] {
        check(1, 2, sequence_parallel, DType::F32, 1e-5);
        check(1, 2, sequence_parallel, DType::F64, 1e-9);
    }
}

#[test]
fn on_four_ranks() {
    for sequence_parallel in [false, true] {
        check(1, 4, sequence_parallel, DType::F32, 1e-5);
        check(1, 4, sequence_parallel, DType::F64, 1e-9);
    }
}

#[test]
fn with_data_parallelism() {
    for sequence_parallel in [false, true] {
        check(2, 2, sequence_parallel, DType::F32, 1e-5);
        check(2, 2, sequence_parallel, DType::F64, 1e-9);
    }
}
