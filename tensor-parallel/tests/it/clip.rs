//! Clipping by global norm: norms and weights equal those of a single process, and parameters that all ranks hold stay equal.

use std::collections::BTreeMap;

use crate::common::{Dense, Part, batch, gap, on_mesh, sizes, values, whole};
use candle_core::{DType, Tensor};
use candle_nn::Optimizer;
use comm::Mesh;
use tensor_parallel::{
    DistributedModel, Error, LanguageModel, Result, Split, TensorParallel, TensorParallelConfig, Weights,
};
use training::{Sgd, SgdConfig, clip_grad_norm};

const STEPS: usize = 12;
const SEED: u64 = 7;

fn sgd(vars: Vec<(String, candle_core::Var)>) -> Sgd {
    let config = SgdConfig { learning_rate: 0.1, momentum: 0.9, ..SgdConfig::default() };
    Sgd::named(vars, config).unwrap()
}

/// Returns the norms and the final weights of a single process.
fn dense(dp: usize, max_norm: f64) -> (Vec<f64>, BTreeMap<String, Tensor>) {
    let model = Dense::new(&sizes(), SEED, DType::F64);
    let vars: Vec<_> = model.named_vars().into_iter().map(|(_, var)| var).collect();
    let mut sgd = sgd(model.named_vars());
    let step = |step| {
        let mut grads = model.loss(step, dp).backward().unwrap();
        let norm = clip_grad_norm(&mut grads, &vars, max_norm).unwrap();
        sgd.step(&grads).unwrap();
        norm
    };
    let norms = (0..STEPS).map(step).collect();
    (norms, model.values())
}

fn model(mesh: &Mesh, sequence_parallel: bool) -> Result<TensorParallel<LanguageModel>> {
    let config =
        TensorParallelConfig { sequence_parallel, dtype: DType::F64, ..TensorParallelConfig::default() };
    TensorParallel::new(mesh, &config, &Weights::seed(SEED), |builder| LanguageModel::new(builder, &sizes()))
}

fn gradients(
    parallel: &TensorParallel<LanguageModel>,
    mesh: &Mesh,
    step: usize,
) -> Result<candle_core::backprop::GradStore> {
    let (tokens, next) = batch(&sizes(), step, mesh.axis("dp")?.rank());
    parallel.backward(&parallel.model()?.loss(&tokens, &next)?)
}

fn parallel(dp: usize, tp: usize, sequence_parallel: bool, max_norm: f64) -> Vec<(Vec<f64>, Vec<Part>)> {
    on_mesh(dp, tp, |mesh| {
        let parallel = model(mesh, sequence_parallel)?;
        let mut sgd = sgd(parallel.named_vars());
        let mut norms = vec![];
        for step in 0..STEPS {
            let mut grads = gradients(&parallel, mesh, step)?;
            norms.push(parallel.clip_grad_norm(&mut grads, max_norm)?);
            sgd.step(&grads)?;
            parallel.check_parameters()?;
        }
        Ok((norms, values(&parallel)))
    })
}

#[test]
fn norms_and_weights_are_those_of_one_process() {
    for (dp, tp) in [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 2)] {
        // Limits that clip always, sometimes, and never.
        for max_norm in [0.05, 1.0, 1e9] {
            let (norms, weights) = dense(dp, max_norm);
            for sequence_parallel in [false, true] {
                let what = format!("dp {dp}, tp {tp}, sequence parallel {sequence_parallel}, {max_norm}");
                let ranks = parallel(dp, tp, sequence_parallel, max_norm);
                for (own, _) in &ranks {
                    assert_eq!(own, &ranks[0].0, "to the bit: {what}");
                }
                for (norm, expected) in ranks[0].0.iter().zip(&norms) {
                    assert!((norm - expected).abs() < 1e-9 * expected, "{what}: {norm}, {expected}");
                }
                for copy in ranks.chunks(tp) {
                    let parts: Vec<_> = copy.iter().map(|(_, parts)| parts.clone()).collect();
                    for (name, tensor) in whole(&parts) {
                        let error = gap(&tensor, &weights[&name]);
                        assert!(error < 1e-9, "{what}: {name}: {error:.1e}");
                    }
                }
            }
        }
    }
}

/// Clipping by each rank's own norm makes replicas drift apart, which the check detects.
#[test]
fn replicas_that_drift_are_named_by_all_ranks() {
    for (dp, tp) in [(1, 2), (2, 2), (1, 4)] {
        let lines = on_mesh(dp, tp, |mesh| {
            let parallel = model(mesh, false)?;
            let mut sgd = sgd(parallel.named_vars());
            parallel.check_parameters()?;
            let mut grads = gradients(&parallel, mesh, 0)?;
            clip_grad_norm(&mut grads, &parallel.vars(), 0.05)?;
            sgd.step(&grads)?;
            let error = parallel.check_parameters().unwrap_err();
            assert!(matches!(error, Error::Strategy(strategy::Error::ParametersDiffer(_))));
            Ok(error.to_string())
        });
        assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
        assert!(
            lines[0].starts_with("parameter position.weight is not the same on every rank"),
            "{}",
            lines[0]
        );
        assert!(lines[0].contains("`clip_grad_norm`"), "{}", lines[0]);
    }
}

/// Replicas of a part are compared by the ranks that have it, and all ranks return the error.
#[test]
fn a_part_that_differs_between_copies_is_named_by_all_ranks() {
    let lines = on_mesh(2, 2, |mesh| {
        let parallel = model(mesh, false)?;
        let divided = parallel.parameters().iter().find(|p| p.split() == Split::Columns).unwrap();
        if mesh.world().rank() == 3 {
            divided.var().set(&divided.var().affine(1.0, 0.5)?)?;
        }
        let line = parallel.check_parameters().unwrap_err().to_string();
        // Training can continue after such an error.
        divided.var().set(&divided.var().zeros_like()?)?;
        parallel.check_parameters()?;
        Ok(line)
    });
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    let line = &lines[0];
    assert!(line.starts_with("parameter layers.0.attention.out.weight is not the same"), "{line}");
    assert!(line.contains("rank 3") && line.contains("rank 1 "), "{line}");
}

#[test]
fn what_is_not_finite_on_one_rank_is_named_by_all_and_changes_nothing() {
    for bad in [f64::NAN, f64::INFINITY] {
        let lines = on_mesh(2, 2, |mesh| {
            let parallel = model(mesh, false)?;
            let mut grads = gradients(&parallel, mesh, 0)?;
            let divided = parallel.parameters().iter().position(|p| p.split() == Split::ROWS).unwrap();
            let var = parallel.parameters()[divided].var();
            if mesh.axis("tp")?.rank() == 1 {
                grads.insert(var, grads.get(var).unwrap().affine(0.0, bad)?);
            }
            let before = crate::common::gradients(&parallel, &grads);
            let error = parallel.clip_grad_norm(&mut grads, 0.1).unwrap_err();
            assert!(matches!(error, Error::Strategy(strategy::Error::NotFinite { rank: 1, .. })), "{error}");
            for ((_, before, _), (_, after, _)) in
                before.iter().zip(crate::common::gradients(&parallel, &grads))
            {
                assert_eq!(crate::common::bits(before), crate::common::bits(&after));
            }
            assert!(parallel.clip_grad_norm(&mut grads, -1.0).is_err());
            Ok(error.to_string())
        });
        assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
        let part = "the gradient of parameter embedding.weight on rank 1 is not finite";
        assert!(lines[0].starts_with(part), "{}", lines[0]);
    }
}
