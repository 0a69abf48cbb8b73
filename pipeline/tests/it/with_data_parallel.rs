//! Stages combined with data parallelism, and parameters that are shared by several stages.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Module, Optimizer, VarBuilder, VarMap, func};
use comm::{Communicator, Local, Mesh, Operation, Stats, Work};
use ops::defer;
use pipeline::{Modules, ParameterGroups, Pipeline, PipelineConfig, ScheduleKind, Split};

use crate::common::{
    Comm, ROWS, STEPS, Trained, WIDTH, alone, assert_equal, batch, loss, modules, optimizer, values, weights,
};

/// 2 stages with 3 replicas each, 3 stages with 2, and 1 stage with 2, on one batch: equal to a single process.
#[test]
fn gradients_are_averaged_over_copies() {
    let (blocks, micro_batches) = (2, 4);
    for schedule in ScheduleKind::ALL {
        for (pp, dp) in [(2, 3), (3, 2), (1, 2)] {
            let rows = ROWS * micro_batches;
            let (expected, expected_losses) = alone(blocks, rows * dp);
            let results = Local::run_shared(pp * dp, |comm| {
                let mesh = Mesh::new(comm, &[("pp", pp), ("dp", dp)])?;
                let copies = mesh.axis("dp")?.clone();
                let copy = copies.rank();
                let config = PipelineConfig {
                    schedule,
                    micro_batches,
                    averaged_over: Some(ParameterGroups::of(copies)),
                    // Each gradient separately, or all together.
                    bucket_bytes: if dp == 2 { 1 } else { 1 << 20 },
                    ..PipelineConfig::default()
                };
                let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?;
                let stages = mesh.axis("pp")?.clone();
                let mut pipeline =
                    Pipeline::new(stages, &modules(blocks), &weights(), &example, loss, &config)?;
                let mut optimizer = optimizer(pipeline.vars());
                let mut losses = Vec::new();
                for step in 0..STEPS {
                    let (x, y) = batch(step, rows * dp)?;
                    let own = |all: &Tensor| all.narrow(0, copy * rows, rows);
                    let step = pipeline.step(Some(&own(&x)?), Some(&own(&y)?))?;
                    optimizer.step(&step.grads)?;
                    losses.extend(step.loss);
                }
                Ok((copy, values(&pipeline.named_vars()), losses))
            })
            .unwrap();
            for copy in 0..dp {
                let own = || results.iter().filter(|result| result.0 == copy);
                let mut got: Trained = own().flat_map(|(_, trained, _)| trained.clone()).collect();
                got.sort_by(|a, b| a.0.cmp(&b.0));
                assert_equal(&got, &expected, &format!("{schedule}, {pp} stages, copy {copy} of {dp}"));
            }
            let losses: Vec<&Vec<f32>> =
                results.iter().map(|(_, _, losses)| losses).filter(|losses| !losses.is_empty()).collect();
            assert_eq!(losses.len(), dp);
            for (step, expected) in expected_losses.iter().enumerate() {
                let mean = losses.iter().map(|losses| losses[step]).sum::<f32>() / dp as f32;
                assert!((mean - expected).abs() < 1e-5 * expected.abs());
            }
        }
    }
}

fn product(weight: Tensor) -> impl candle_nn::ModuleT + Send {
    func(move |x| x.matmul(&weight.t()?))
}

fn drawn(vb: &VarBuilder<'_>, name: &str) -> Result<Tensor> {
    vb.get_with_hints((WIDTH, WIDTH), name, candle_nn::init::DEFAULT_KAIMING_UNIFORM)
}

/// A model in which all modules but the second share one weight.
fn tied_modules(names: &[&str]) -> Modules {
    let weight = |vb: VarBuilder<'static>| Ok(product(drawn(&vb, "weight")?));
    let first = Modules::new().module(names[0], weight).module("middle", |vb| ops::linear(WIDTH, WIDTH, vb));
    names[1..].iter().fold(first, |modules, name| modules.module(name, weight))
}

/// Trains in a single process, with one weight for all of these modules.
fn with_one_weight(names: &[&str], rows: usize) -> Trained {
    let (map, builder) = (VarMap::new(), weights());
    let root = builder(&map);
    let weight = drawn(&root, &format!("{}.weight", names[0])).unwrap();
    let middle = ops::linear(WIDTH, WIDTH, root.pp("middle")).unwrap();
    let vars: Vec<(String, Var)> =
        map.data().lock().unwrap().iter().map(|(name, var)| (name.clone(), var.clone())).collect();
    let mut sgd = optimizer(vars.iter().map(|(_, var)| var.clone()).collect());
    for step in 0..STEPS {
        let (x, y) = batch(step, rows).unwrap();
        let output = middle.forward(&x.matmul(&weight.t().unwrap()).unwrap()).unwrap();
        let last = |x: Tensor, _: &&str| x.matmul(&weight.t().unwrap()).unwrap();
        let output = names[1..].iter().fold(output, last);
        sgd.step(&loss(&output, &y).unwrap().backward().unwrap()).unwrap();
    }
    let mut expected = values(&vars);
    let first = format!("{}.weight", names[0]);
    let shared = expected.iter().find(|(name, _)| *name == first).unwrap().1.clone();
    expected.extend(names[1..].iter().map(|name| (format!("{name}.weight"), shared.clone())));
    expected.sort_by(|a, b| a.0.cmp(&b.0));
    expected
}

fn check_tied(names: &[&str], pairs: &[(usize, usize)]) {
    let (micro_batches, weight) = (3, |place: usize| format!("{}.weight", names[place]));
    let rows = ROWS * micro_batches;
    let expected = with_one_weight(names, rows);
    let tied: Vec<_> = pairs.iter().map(|&(first, second)| (weight(first), weight(second))).collect();
    for (schedule, ranks) in
        (1..=names.len() + 1).map(|ranks| (ScheduleKind::OneFOneB, ranks)).chain([(ScheduleKind::ZbV, 2)])
    {
        if schedule == ScheduleKind::ZbV && names.len() < 3 {
            continue;
        }
        let results = Local::run_shared(ranks, |comm| {
            let config =
                PipelineConfig { schedule, micro_batches, tied: tied.clone(), ..PipelineConfig::default() };
            let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?;
            let modules = tied_modules(names);
            let mut pipeline = Pipeline::new(comm, &modules, &weights(), &example, loss, &config)?;
            let mut sgd = optimizer(pipeline.vars());
            for step in 0..STEPS {
                let (x, y) = batch(step, rows)?;
                sgd.step(&pipeline.step(Some(&x), Some(&y))?.grads)?;
            }
            Ok(values(&pipeline.named_vars()))
        })
        .unwrap();
        let mut got: Trained = results.into_iter().flatten().collect();
        got.sort_by(|a, b| a.0.cmp(&b.0));
        let of = |place: usize| &got.iter().find(|(known, _)| *known == weight(place)).unwrap().1;
        assert!((1..names.len()).all(|place| of(place) == of(0)), "to the bit: {pairs:?}, {ranks} ranks");
        assert_equal(&got, &expected, &format!("{pairs:?}, {schedule}, {ranks} ranks"));
    }
}

#[test]
fn tied_parameters_are_one() {
    check_tied(&["first", "last"], &[(0, 1)]);
}

#[test]
fn parameters_that_are_tied_by_several_pairs_are_one() {
    let names = ["first", "third", "last"];
    for pairs in [[(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 2), (1, 2)]] {
        check_tied(&names, &pairs);
    }
    check_tied(&["first", "third", "fourth", "last"], &[(0, 1), (2, 3), (3, 1)]);
}

/// Communicator that keeps references to the groups created from it.
#[derive(Debug)]
struct Watched {
    inner: Comm,
    groups: Mutex<Vec<Comm>>,
}

impl Watched {
    /// Returns the number of operations of all groups created from it.
    fn operations(&self) -> u64 {
        self.groups.lock().unwrap().iter().map(|group| group.stats().operations).sum()
    }
}

impl Communicator for Watched {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn backend(&self) -> &'static str {
        self.inner.backend()
    }

    fn stats(&self) -> Stats {
        self.inner.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.inner.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> comm::Result<Comm> {
        let group = self.inner.subgroup(ranks)?;
        self.groups.lock().unwrap().push(group.clone());
        Ok(group)
    }

    fn submit(&self, operation: Operation) -> comm::Result<Work> {
        self.inner.submit(operation)
    }

    fn run(&self, operation: Operation) -> comm::Result<()> {
        self.inner.run(operation)
    }
}

/// Returns a module that is the identity, and computes its weight's gradient only after another gradient has been averaged.
fn patient(copies: &Arc<Watched>) -> impl Fn(VarBuilder<'static>) -> Result<Patient> + 'static {
    let copies = copies.clone();
    move |vb| Ok(Patient { weight: vb.get((), "weight")?, copies: copies.clone() })
}

struct Patient {
    weight: Tensor,
    copies: Arc<Watched>,
}

impl Module for Patient {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, copies) = (self.weight.clone(), self.copies.clone());
        let backward = move |gradient: &Tensor| {
            let (before, copies, none) = (copies.operations(), copies.clone(), weight.zeros_like()?);
            let later = none.clone();
            let put_off = defer(&[&weight], move || {
                let began = Instant::now();
                while copies.operations() == before {
                    assert!(began.elapsed() < Duration::from_secs(30), "nothing is averaged meanwhile");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(vec![later])
            });
            Ok(vec![Some(gradient.clone()), (!put_off).then_some(none)])
        };
        Ok(comm::autograd::custom("patient", &[x, &self.weight], x.detach().copy()?, backward)?)
    }
}

#[test]
fn gradients_are_averaged_while_others_are_computed() {
    // Schedules that do not defer weight gradients for other reasons.
    for schedule in [ScheduleKind::GPipe, ScheduleKind::OneFOneB] {
        let results = Local::run_shared(4, |comm| {
            let mesh = Mesh::new(comm, &[("pp", 2), ("dp", 2)])?;
            let copies = Arc::new(Watched { inner: mesh.axis("dp")?.clone(), groups: Mutex::default() });
            let stage = |modules: Modules, stage: usize| {
                let linear = |vb| ops::linear(WIDTH, WIDTH, vb);
                modules
                    .module(&format!("{stage}.patient"), patient(&copies))
                    .module(&format!("{stage}.fc"), linear)
            };
            let modules = stage(stage(Modules::new(), 0), 1);
            let config = PipelineConfig {
                schedule,
                micro_batches: 3,
                split: Split::at(["1.patient"]),
                averaged_over: Some(ParameterGroups::of(copies.clone())),
                bucket_bytes: 1,
                ..PipelineConfig::default()
            };
            let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu)?;
            let stages = mesh.axis("pp")?.clone();
            let mut pipeline = Pipeline::new(stages, &modules, &weights(), &example, loss, &config)?;
            let (x, y) = batch(0, 3 * ROWS)?;
            let grads = pipeline.step(Some(&x), Some(&y))?.grads;
            Ok(pipeline.vars().iter().filter(|var| grads.get(var).is_some()).count())
        });
        assert_eq!(results.unwrap(), [3; 4]);
    }
}
