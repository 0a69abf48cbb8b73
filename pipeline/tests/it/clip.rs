//! Clipping by the norm over all stages: norms and weights equal those of a single process.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, ModuleT, Optimizer, VarBuilder, VarMap, func};
use comm::{Local, Mesh};
use ops::linear;
use pipeline::{DistributedModel, Error, Modules, ParameterGroups, Pipeline, PipelineConfig, ScheduleKind};
use training::clip_grad_norm;

use crate::common::{
    Comm, ROWS, Trained, WIDTH, assert_equal, batch, layers, loss, modules, optimizer, values, weights,
};

const STEPS: usize = 6;
const MICRO_BATCHES: usize = 4;
/// Below the norms of all steps.
const MAX_NORM: f64 = 0.05;

/// Trains in a single process, on the batches of all replicas; returns norms and final weights.
fn alone(
    rows: usize,
    vars: &[(String, Var)],
    forward: impl Fn(&Tensor) -> Result<Tensor>,
) -> (Vec<f64>, Trained) {
    let list: Vec<Var> = vars.iter().map(|(_, var)| var.clone()).collect();
    let mut sgd = optimizer(list.clone());
    let mut step = |step| {
        let (x, y) = batch(step, rows).unwrap();
        let mut grads = loss(&forward(&x).unwrap(), &y).unwrap().backward().unwrap();
        let norm = clip_grad_norm(&mut grads, &list, MAX_NORM).unwrap();
        sgd.step(&grads).unwrap();
        assert!(norm > MAX_NORM, "{norm}: nothing is tested");
        norm
    };
    ((0..STEPS).map(&mut step).collect(), values(vars))
}

fn named(map: &VarMap) -> Vec<(String, Var)> {
    map.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect()
}

/// Trains the model of `crate::common::modules`.
fn plain(blocks: usize, rows: usize) -> (Vec<f64>, Trained) {
    let (map, builder) = (VarMap::new(), weights());
    let layers = layers(blocks, &builder(&map));
    alone(rows, &named(&map), |x| layers.iter().try_fold(x.clone(), |x, layer| layer.forward_t(&x, true)))
}

/// Trains on a mesh; returns norms and final weights.
fn in_stages(
    mesh: &Mesh,
    modules: &Modules,
    config: &PipelineConfig,
) -> pipeline::Result<(Vec<f64>, Trained)> {
    let tensor = |error| Error::Comm(comm::Error::from(error));
    let copies: Comm = mesh.axis("dp")?.clone();
    let (copy, count, rows) = (copies.rank(), copies.world_size(), ROWS * config.micro_batches);
    let config = PipelineConfig { averaged_over: Some(ParameterGroups::of(copies)), ..config.clone() };
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).map_err(tensor)?;
    let stages = mesh.axis("pp")?.clone();
    let mut pipeline = Pipeline::new(stages, modules, &weights(), &example, loss, &config)?;
    let mut sgd = optimizer(pipeline.vars());
    let mut norms = Vec::new();
    for step in 0..STEPS {
        let (x, y) = batch(step, rows * count).map_err(tensor)?;
        let own = |all: &Tensor| all.narrow(0, copy * rows, rows).map_err(tensor);
        let mut step = pipeline.step(Some(&own(&x)?), Some(&own(&y)?))?;
        norms.push(pipeline.clip_grad_norm(&mut step.grads, MAX_NORM)?);
        sgd.step(&step.grads).map_err(tensor)?;
        pipeline.check_parameters()?;
    }
    Ok((norms, values(&pipeline.named_vars())))
}

fn check(
    (pp, dp): (usize, usize),
    config: &PipelineConfig,
    modules: impl Fn() -> Modules + Sync,
    expected: &(Vec<f64>, Trained),
) {
    let what = format!("{}, {pp} stages, {dp} copies", config.schedule);
    let ranks = Local::run_shared(pp * dp, |comm| {
        let mesh = Mesh::new(comm, &[("pp", pp), ("dp", dp)])?;
        Ok((mesh.axis("dp")?.rank(), in_stages(&mesh, &modules(), config)?))
    });
    let ranks = ranks.unwrap();
    for (_, (norms, _)) in &ranks {
        assert_eq!(norms, &ranks[0].1.0, "to the bit: {what}");
        for (norm, expected) in norms.iter().zip(&expected.0) {
            assert!((norm - expected).abs() < 1e-10 * expected, "{what}: {norm}, {expected}");
        }
    }
    for copy in 0..dp {
        let own = ranks.iter().filter(|(of, _)| *of == copy);
        let mut got: Trained = own.flat_map(|(_, (_, trained))| trained.clone()).collect();
        got.sort_by(|a, b| a.0.cmp(&b.0));
        assert_equal(&got, &expected.1, &what);
    }
}

#[test]
fn norms_and_weights_are_those_of_one_process_with_every_schedule() {
    for dp in [1, 2] {
        let expected = plain(2, ROWS * MICRO_BATCHES * dp);
        for schedule in ScheduleKind::ALL {
            for pp in [1, 2, 3] {
                let config =
                    PipelineConfig { schedule, micro_batches: MICRO_BATCHES, ..PipelineConfig::default() };
                check((pp, dp), &config, || modules(2), &expected);
            }
        }
    }
}

fn product(weight: Tensor) -> impl ModuleT + Send {
    func(move |x| x.matmul(&weight.t()?))
}

fn drawn(vb: &VarBuilder<'_>, name: &str) -> Result<Tensor> {
    vb.get_with_hints((WIDTH, WIDTH), name, candle_nn::init::DEFAULT_KAIMING_UNIFORM)
}

/// A model whose first, third and last modules share one parameter.
fn tied_modules() -> Modules {
    let weight = |vb: VarBuilder<'static>| Ok(product(drawn(&vb, "weight")?));
    let modules = Modules::new().module("first", weight).module("middle", |vb| linear(WIDTH, WIDTH, vb));
    modules.module("third", weight).module("last", weight)
}

#[test]
fn tied_parameters_are_counted_once() {
    let names = ["first.weight", "third.weight", "last.weight"];
    let tied: Vec<_> = names[1..].iter().map(|name| (names[0].to_string(), (*name).to_string())).collect();
    for dp in [1, 2] {
        let (map, builder) = (VarMap::new(), weights());
        let root = builder(&map);
        let weight = drawn(&root, names[0]).unwrap();
        let middle = linear(WIDTH, WIDTH, root.pp("middle")).unwrap();
        let forward = |x: &Tensor| {
            let weight = weight.t()?;
            middle.forward(&x.matmul(&weight)?)?.matmul(&weight)?.matmul(&weight)
        };
        let (norms, mut trained) = alone(ROWS * MICRO_BATCHES * dp, &named(&map), forward);
        let shared = trained.iter().find(|(name, _)| name == names[0]).unwrap().1.clone();
        trained.extend(names[1..].iter().map(|name| ((*name).to_string(), shared.clone())));
        trained.sort_by(|a, b| a.0.cmp(&b.0));
        // Two of them on one rank and the third on another, each on a different rank, or all on one.
        for (schedule, pp) in (1..=4).map(|pp| (ScheduleKind::OneFOneB, pp)).chain([(ScheduleKind::ZbV, 2)]) {
            let (micro_batches, tied) = (MICRO_BATCHES, tied.clone());
            let config = PipelineConfig { schedule, micro_batches, tied, ..PipelineConfig::default() };
            check((pp, dp), &config, tied_modules, &(norms.clone(), trained.clone()));
        }
    }
}

fn two_stages(comm: Comm, config: &PipelineConfig) -> pipeline::Result<Pipeline> {
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).unwrap();
    Pipeline::new(comm, &tied_modules(), &weights(), &example, loss, config)
}

#[test]
fn what_is_not_finite_in_one_stage_is_named_by_all_and_changes_nothing() {
    let lines = Local::run_shared(2, |comm| {
        let mut pipeline = two_stages(comm.clone(), &PipelineConfig::default())?;
        let (x, y) = batch(0, ROWS)?;
        let mut grads = pipeline.step(Some(&x), Some(&y))?.grads;
        let (_, var) = pipeline.named_vars().remove(0);
        if comm.rank() == 1 {
            grads.insert(&var, grads.get(&var).unwrap().affine(f64::NAN, 0.0)?);
        }
        let before =
            grads.get(&pipeline.vars()[1]).map(|grad| grad.flatten_all()?.to_vec1::<f64>()).transpose()?;
        let line = pipeline.clip_grad_norm(&mut grads, 0.1).unwrap_err().to_string();
        let after =
            grads.get(&pipeline.vars()[1]).map(|grad| grad.flatten_all()?.to_vec1::<f64>()).transpose()?;
        assert_eq!(before, after);
        Ok(line)
    });
    let lines = lines.unwrap();
    assert_eq!(lines[0], lines[1]);
    assert!(
        lines[0].starts_with("the gradient of ") && lines[0].contains("on rank 1 is not finite"),
        "{}",
        lines[0]
    );
}

#[test]
fn copies_and_tied_parameters_that_differ_are_named_by_all() {
    let tied = vec![("first.weight".to_string(), "last.weight".to_string())];
    let found = Local::run_shared(4, |comm| {
        let mesh = Mesh::new(comm.clone(), &[("pp", 2), ("dp", 2)])?;
        let (dp, tied) = (Some(mesh.axis("dp")?.clone()), tied.clone());
        let config =
            PipelineConfig { averaged_over: dp.map(ParameterGroups::of), tied, ..PipelineConfig::default() };
        let pipeline = two_stages(mesh.axis("pp")?.clone(), &config)?;
        pipeline.check_parameters()?;
        let change = |of: &str, ranks: &[usize]| -> comm::Result<String> {
            let own = pipeline.named_vars().into_iter().find(|(name, _)| name == of);
            let own = own.filter(|_| ranks.contains(&comm.rank()));
            let before = own.as_ref().map(|(_, var)| var.copy()).transpose()?;
            if let Some((_, var)) = &own {
                var.set(&var.affine(1.0, 0.5)?)?;
            }
            let line = pipeline.check_parameters().unwrap_err().to_string();
            if let (Some((_, var)), Some(before)) = (&own, before) {
                var.set(&before)?;
            }
            pipeline.check_parameters()?;
            Ok(line)
        };
        // First changed on one replica, then on both, so that only the other end of the tie differs.
        Ok((change("third.weight", &[3])?, change("last.weight", &[2, 3])?))
    });
    for (copies, tied) in found.unwrap() {
        assert!(copies.starts_with("parameter third.weight is not the same on every rank"), "{copies}");
        assert!(copies.contains("rank 3 has") && copies.contains("rank 2 has"), "{copies}");
        assert!(
            tied.starts_with("parameter ") && tied.contains("rank 2 has") && tied.contains("rank 0 has"),
            "{tied}"
        );
    }
}

/// As in one process: an optimizer with weight decay must not change variables that nothing depends on.
#[test]
fn ties_that_no_stage_uses_have_no_gradient() {
    let found = Local::run_shared(2, |comm| {
        let unused = |vb: VarBuilder<'static>| {
            let weight = drawn(&vb, "weight")?.detach();
            Ok(product(weight))
        };
        let modules = Modules::new().module("first", unused).module("middle", |vb| linear(WIDTH, WIDTH, vb));
        let modules = modules.module("last", unused);
        let tied = vec![("first.weight".to_string(), "last.weight".to_string())];
        let config = PipelineConfig { tied, ..PipelineConfig::default() };
        let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?;
        let mut pipeline = Pipeline::new(comm, &modules, &weights(), &example, loss, &config)?;
        let (x, y) = batch(0, ROWS)?;
        let grads = pipeline.step(Some(&x), Some(&y))?.grads;
        let found = pipeline.named_vars().into_iter().map(|(name, var)| (name, grads.get(&var).is_some()));
        Ok(found.collect::<Vec<_>>())
    });
    for (name, has_gradient) in found.unwrap().into_iter().flatten() {
        assert_eq!(has_gradient, name.starts_with("middle"), "{name}");
    }
}
