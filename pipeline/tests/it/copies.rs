//! Data-parallel replicas of the stages: they start equal, and a failure on one is reported to all.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use candle_core::{DType, Device, Module, Tensor, Var};
use candle_nn::{Init, VarBuilder, VarMap, func};
use comm::{Local, LocalConfig, Mesh};
use ops::defer;
use pipeline::{
    Cost, Error, Modules, ParameterGroups, Pipeline, PipelineConfig, Result, ScheduleKind, Split,
};
use sampler::{Generator, SharedGenerator};
use training::TorchInit;

use crate::common::{Comm, ROWS, WIDTH, assert_equal, batch, loss, modules, values, weights};

/// Runs `body` on the ranks of 2 stages and `dp` replicas of each, and returns the results. Rank `s * dp + c` has stage s of
/// replica c.
fn on_mesh<T: Send>(dp: usize, body: impl Fn(&Mesh) -> Result<T> + Sync) -> Vec<Result<T>> {
    let config = LocalConfig { timeout: Duration::from_secs(60), ..LocalConfig::default() };
    let group = Local::group(2 * dp, &config).unwrap();
    let body = &body;
    std::thread::scope(|scope| {
        let rank = |comm| scope.spawn(move || body(&Mesh::new(Arc::new(comm), &[("pp", 2), ("dp", dp)])?));
        let threads: Vec<_> = group.into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn axis(mesh: &Mesh, name: &str) -> Comm {
    mesh.axis(name).unwrap().clone()
}

fn make(
    mesh: &Mesh,
    modules: &Modules,
    builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
    loss: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> + Send + 'static,
    config: PipelineConfig,
) -> Result<Pipeline> {
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).unwrap();
    let config = PipelineConfig { averaged_over: Some(ParameterGroups::of(axis(mesh, "dp"))), ..config };
    Pipeline::new(axis(mesh, "pp"), modules, builder, &example, loss, &config)
}

#[test]
fn copies_begin_with_the_weights_of_the_first() {
    let results = on_mesh(3, |mesh| {
        let copy = axis(mesh, "dp").rank();
        let generator = SharedGenerator::from(Generator::new(5 + copy as u64));
        let builder = |map: &VarMap| TorchInit::var_builder(&generator, map, DType::F64, &Device::Cpu);
        let pipeline = make(mesh, &modules(2), &builder, loss, PipelineConfig::default())?;
        Ok(values(&pipeline.named_vars()))
    });
    let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    for stage in 0..2 {
        for copy in 1..3 {
            assert_eq!(results[3 * stage + copy], results[3 * stage], "stage {stage}, copy {copy}");
        }
    }
    assert_ne!(results[0], results[3]);
}

/// A layer that a stage uses in two recomputed parts, and once without recomputation: the sum of all gradients is averaged.
#[test]
fn a_layer_in_several_recomputed_parts_has_the_sum_of_all() {
    let train = |schedule: ScheduleKind, again: bool| {
        let results = on_mesh(2, |mesh| {
            let module = move |vb: VarBuilder<'static>| {
                let layer = ops::linear(WIDTH, WIDTH, vb)?;
                Ok(func(move |x: &Tensor| {
                    let part = |layer: ops::Linear| move |x: &Tensor| layer.forward(x)?.tanh();
                    let inner = layer.clone();
                    let nested = move |x: &Tensor| ops::recompute(&inner.forward(x)?, part(inner.clone()));
                    match again {
                        true => ops::recompute(&ops::recompute(x, part(layer.clone()))?, nested),
                        false => part(layer.clone())(&layer.forward(&part(layer.clone())(x)?)?),
                    }
                    .and_then(|x| layer.forward(&x))
                }))
            };
            let modules =
                ["a", "b", "c", "d"].into_iter().fold(Modules::new(), |all, name| all.module(name, module));
            let config = PipelineConfig { schedule, micro_batches: 4, ..PipelineConfig::default() };
            let mut pipeline = make(mesh, &modules, &weights(), loss, config)?;
            let (x, y) = batch(axis(mesh, "dp").rank(), 4 * ROWS).unwrap();
            let grads = pipeline.step(Some(&x), Some(&y))?.grads;
            let of = |(name, var): (String, Var)| {
                let numbers = grads.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
                (name, numbers)
            };
            Ok(pipeline.named_vars().into_iter().map(of).collect::<Vec<_>>())
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    for schedule in ScheduleKind::ALL {
        for (got, expected) in train(schedule, true).iter().zip(&train(schedule, false)) {
            assert_equal(got, expected, &schedule.to_string());
        }
    }
}

#[test]
fn copies_of_another_model_are_refused() {
    let config = || PipelineConfig { split: Split::at(["second"]), ..PipelineConfig::default() };
    for result in on_mesh(2, |mesh| {
        let odd = mesh.world().rank() == 3;
        let last = move |vb: VarBuilder<'static>| match odd {
            true => candle_nn::linear_no_bias(WIDTH, WIDTH, vb),
            false => candle_nn::linear(WIDTH, WIDTH, vb),
        };
        let first = |vb| candle_nn::linear(WIDTH, WIDTH, vb);
        make(mesh, &Modules::new().module("first", first).module("second", last), &weights(), loss, config())
    }) {
        let line = result.unwrap_err().to_string();
        let cause = "a variable of the model is second.weight: f64 [6, 6] on rank 3 and second.bias: f64 [6] on rank 2";
        assert!(line.contains(cause), "{line}");
    }
    for result in on_mesh(2, |mesh| {
        let micro_batches = if axis(mesh, "dp").rank() == 1 { 3 } else { 2 };
        let config = PipelineConfig { micro_batches, ..PipelineConfig::default() };
        make(mesh, &modules(1), &weights(), loss, config)
    }) {
        let line = result.unwrap_err().to_string();
        assert!(line.contains("the number of micro-batches is 3 on rank 1 and 2 on rank 0"), "{line}");
    }
}

#[test]
fn a_failure_of_one_copy_reaches_the_others() {
    for schedule in ScheduleKind::ALL {
        // Whether the failed ranks keep their pipelines until all have failed.
        for keeps in [true, false] {
            let ended = Barrier::new(4);
            let results = on_mesh(2, |mesh| {
                let odd = mesh.world().rank();
                let calls = AtomicUsize::new(0);
                let unlucky = move |output: &Tensor, target: &Tensor| {
                    // Fails in the second step, in the last stage of one replica.
                    match [2, 0].contains(&odd) && calls.fetch_add(1, Ordering::Relaxed) == 5 {
                        true => Err(candle_core::Error::Msg("out of luck".into())),
                        false => loss(output, target),
                    }
                };
                let config = PipelineConfig { schedule, micro_batches: 4, ..PipelineConfig::default() };
                let mut pipeline = make(mesh, &modules(2), &weights(), unlucky, config)?;
                let (x, y) = batch(0, 4 * ROWS).unwrap();
                let result = (0..3).try_for_each(|_| pipeline.step(Some(&x), Some(&y)).map(drop));
                if keeps {
                    ended.wait();
                }
                result
            });
            // With ZB-V the first rank has the last stage.
            let owner = if schedule == ScheduleKind::ZbV { 0 } else { 2 };
            for (rank, result) in results.into_iter().enumerate() {
                let line = result.unwrap_err().to_string();
                let told = if rank == owner { "" } else { &format!("rank {owner} could not go on: ") };
                let expected = format!("{told}the loss: out of luck");
                assert!(line.starts_with(&expected), "{schedule}, keeps {keeps}, rank {rank}: {line}");
            }
        }
    }
}

/// A rank that is still computing long after the others have ended can read their report later.
#[test]
fn a_slow_copy_hears_the_cause_from_whoever_has_it() {
    for _ in 0..10 {
        let ended = Barrier::new(5);
        let results = on_mesh(3, |mesh| {
            let rank = mesh.world().rank();
            let config = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
            let calls = AtomicUsize::new(0);
            let unlucky = move |output: &Tensor, target: &Tensor| match rank == 4
                && calls.fetch_add(1, Ordering::Relaxed) == 2
            {
                true => Err(candle_core::Error::Msg("out of luck".into())),
                false => loss(output, target),
            };
            let mut pipeline = make(mesh, &modules(2), &weights(), unlucky, config)?;
            let (x, y) = batch(0, 2 * ROWS).unwrap();
            pipeline.step(Some(&x), Some(&y))?;
            // The last stage of the third replica starts its step when all others have ended.
            let is_late = rank == 5;
            if is_late {
                ended.wait();
            }
            let result = pipeline.step(Some(&x), Some(&y)).map(drop);
            drop(pipeline);
            // The first stage of that replica waits for the last.
            if ![2, 5].contains(&rank) {
                ended.wait();
            }
            result
        });
        for (rank, result) in results.into_iter().enumerate() {
            let line = result.unwrap_err().to_string();
            let told = if rank == 4 { "" } else { "rank 4 could not go on: " };
            assert!(line.starts_with(&format!("{told}the loss: out of luck")), "rank {rank}: {line}");
        }
    }
}

#[test]
fn a_copy_that_does_not_fit_is_told_to_the_others() {
    let results = on_mesh(2, |mesh| {
        let odd = axis(mesh, "dp").rank() == 1;
        let last = move |x: &Tensor| if odd { x.narrow(1, 0, 2 * WIDTH) } else { x.tanh() };
        let first = |vb| ops::linear(WIDTH, WIDTH, vb);
        let modules = Modules::new().module("first", first).module("last", move |_| Ok(func(last)));
        make(mesh, &modules, &weights(), loss, PipelineConfig::default())
    });
    for (rank, result) in results.into_iter().enumerate() {
        let line = result.unwrap_err().to_string();
        let told = if rank % 2 == 1 { "" } else { "rank 1 could not go on: " };
        assert!(line.starts_with(&format!("{told}stage 1 on rank 3 fails on")), "rank {rank}: {line}");
    }
}

#[test]
fn ranks_go_by_their_numbers_in_the_whole_job() {
    let unfit = || {
        let linear = |vb| ops::linear(WIDTH + 1, WIDTH, vb);
        Modules::new().module("a", |_| Ok(func(Tensor::tanh))).module("b", linear)
    };
    for result in on_mesh(2, |mesh| make(mesh, &unfit(), &weights(), loss, PipelineConfig::default())) {
        let line = result.unwrap_err().to_string();
        assert!(
            line.starts_with("stage 1 on rank 2 fails") || line.starts_with("stage 1 on rank 3 fails"),
            "{line}"
        );
    }
    let results = on_mesh(2, |mesh| {
        make(mesh, &modules(1), &weights(), loss, PipelineConfig::default())?.step(None, None).map(drop)
    });
    for (rank, result) in results.into_iter().enumerate() {
        let line = result.unwrap_err().to_string();
        assert!(line.starts_with(&format!("rank {rank} has the ")), "{line}");
    }
}

#[test]
fn what_cannot_be_measured_is_told_to_all() {
    let unfit = || {
        let linear = |vb| ops::linear(WIDTH + 1, WIDTH, vb);
        Modules::new().module("a", |_| Ok(func(Tensor::tanh))).module("b", linear)
    };
    let config = || PipelineConfig { split: Split::Balanced(Cost::ForwardTime), ..PipelineConfig::default() };
    let results = on_mesh(2, |mesh| make(mesh, &unfit(), &weights(), loss, config()));
    for (rank, result) in results.into_iter().enumerate() {
        let line = result.unwrap_err().to_string();
        // The ranks of each replica's first stage take part in the measurement.
        let told = if rank < 2 { "" } else { "rank 0 could not go on: " };
        assert!(
            line.starts_with(&format!("{told}measuring modules: linear: input must be")),
            "{rank}: {line}"
        );
    }
}

/// `x + a + b`, whose weights have the same gradient, which a custom operation may return as the same tensor.
#[test]
fn gradients_that_are_one_tensor_are_added_apart() {
    let both = |vb: VarBuilder<'static>| {
        let (a, b) = (vb.get((ROWS, WIDTH), "a")?, vb.get((ROWS, WIDTH), "b")?);
        Ok(func(move |x| {
            let sum = ((x + &a)? + &b)?;
            let weights = [a.clone(), b.clone()];
            let backward = move |gradient: &Tensor| {
                let (gradient, more) = (gradient.clone(), gradient.clone());
                let later = move || Ok(vec![more.clone(), more]);
                let put_off = defer(&[&weights[0], &weights[1]], later);
                let own = (!put_off).then(|| gradient.clone());
                Ok(vec![Some(gradient), own.clone(), own])
            };
            Ok(comm::autograd::custom("both", &[x, &a, &b], sum.detach().copy()?, backward)?)
        }))
    };
    let made = || Modules::new().module("first", both).module("last", both);
    let grads = |schedule: ScheduleKind, dp: usize, micro_batches: usize| {
        on_mesh(dp, |mesh| {
            let config = PipelineConfig {
                schedule,
                micro_batches,
                stages_per_rank: Some(1),
                ..PipelineConfig::default()
            };
            let mut pipeline = make(mesh, &made(), &weights(), loss, config)?;
            let (x, y) = batch(0, micro_batches * ROWS).unwrap();
            let grads = pipeline.step(Some(&x), Some(&y))?.grads;
            let grad = |(_, var): (String, Var)| {
                grads.get(&var).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap()
            };
            Ok(pipeline.named_vars().into_iter().map(grad).collect::<Vec<_>>())
        })
        .into_iter()
        .map(Result::unwrap)
        .collect::<Vec<_>>()
    };
    for dp in 1..=2 {
        for micro_batches in [1, 3] {
            let expected = grads(ScheduleKind::OneFOneB, 1, micro_batches);
            let got = grads(ScheduleKind::ZbH1, dp, micro_batches);
            for (rank, grads) in got.iter().enumerate() {
                for (got, expected) in grads.iter().flatten().zip(expected[rank / dp].iter().flatten()) {
                    assert!(
                        (got - expected).abs() < 1e-12,
                        "{dp} copies, {micro_batches}: {got}, not {expected}"
                    );
                }
            }
        }
    }
}

/// One rank starts its next step long after the other has failed in it.
#[test]
fn a_rank_that_comes_late_hears_the_cause() {
    let (failed, width) = (Barrier::new(2), 64);
    let group = Local::group(2, &LocalConfig::default()).unwrap();
    let run = |comm: Comm| -> Result<()> {
        let rank = comm.rank();
        let linear = move |vb| ops::linear(width, width, vb);
        let modules = Modules::new().module("first", linear).module("last", linear);
        // Large enough that receives are posted before they are needed.
        let example = Tensor::zeros((128, width), DType::F64, &Device::Cpu).unwrap();
        let config = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
        let mut pipeline = Pipeline::new(comm, &modules, &weights(), &example, loss, &config)?;
        let rows = |count: usize| Tensor::zeros((count, width), DType::F64, &Device::Cpu).unwrap();
        pipeline.step(Some(&rows(256)), Some(&rows(256)))?;
        if rank == 1 {
            let result = pipeline.step(None, Some(&rows(3)));
            failed.wait();
            return result.map(drop);
        }
        failed.wait();
        pipeline.step(Some(&rows(256)), None).map(drop)
    };
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = group.into_iter().map(|comm| scope.spawn(|| run(Arc::new(comm)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let errors: Vec<Error> = results.into_iter().map(Result::unwrap_err).collect();
    let cause = "the target has 3 rows";
    assert!(errors[1].to_string().starts_with(cause), "{}", errors[1]);
    assert!(errors[0].to_string().starts_with(&format!("rank 1 could not go on: {cause}")), "{}", errors[0]);
}

/// Returns the first elements of the gradients of both stages' experts, on each of two replicas: replica 1 has ten times the
/// input of replica 0, and uses the expert given by `used`.
fn of_experts(used: [usize; 2]) -> Vec<Vec<(String, Option<f64>)>> {
    Local::run_shared(4, |comm| {
        let mesh = Mesh::new(comm, &[("pp", 2), ("dp", 2)])?;
        let dp = mesh.axis("dp")?.clone();
        let (copy, expert) = (dp.rank(), used[dp.rank()]);
        let config = PipelineConfig {
            micro_batches: 2,
            averaged_over: Some(ParameterGroups::of(dp)),
            ..PipelineConfig::default()
        };
        let experts = move |vb: VarBuilder<'static>| {
            let weights = (0..3).map(|e| vb.get_with_hints((2, 2), &format!("e{e}"), Init::Const(0.5)));
            let weights = weights.collect::<candle_core::Result<Vec<Tensor>>>()?;
            Ok(func(move |x: &Tensor| x.matmul(&weights[expert])))
        };
        let modules = Modules::new().module("a", experts).module("b", experts);
        let builder = |map: &VarMap| VarBuilder::from_varmap(map, DType::F64, &Device::Cpu);
        let example = Tensor::zeros((1, 2), DType::F64, &Device::Cpu)?;
        let loss = |output: &Tensor, _: &Tensor| output.sum_all();
        let pp = mesh.axis("pp")?.clone();
        let mut pipeline = Pipeline::new(pp, &modules, &builder, &example, loss, &config)?;
        let x = (Tensor::ones((2, 2), DType::F64, &Device::Cpu)? * (1.0 + 9.0 * copy as f64))?;
        let step = pipeline.step(Some(&x), Some(&x))?;
        let first =
            |var: &Var| step.grads.get(var)?.flatten_all().ok()?.to_vec1::<f64>().ok()?.first().copied();
        Ok(pipeline.named_vars().iter().map(|(name, var)| (name.clone(), first(var))).collect())
    })
    .unwrap()
}

/// Each gradient is averaged with that of the same variable; a variable without a gradient on any replica has none.
#[test]
fn copies_may_compute_with_other_variables() {
    // With one expert for both replicas, its gradient is the mean over both, which is the sum of the gradients of two
    // separate experts.
    let both = of_experts([0, 0]);
    let apart = of_experts([0, 1]);
    for (one, two) in both.iter().zip(&apart) {
        let numbers =
            |ranks: &[(String, Option<f64>)]| ranks.iter().map(|(_, number)| *number).collect::<Vec<_>>();
        let (one, two) = (numbers(one), numbers(two));
        assert!(one[0].is_some() && one[1..] == [None, None], "{one:?}");
        let parts = [two[0].unwrap(), two[1].unwrap()];
        assert!((parts[1] - 10.0 * parts[0]).abs() < 1e-12 && two[2].is_none(), "{two:?}");
        assert!((parts[0] + parts[1] - one[0].unwrap()).abs() < 1e-12, "{one:?}, {two:?}");
    }
    assert_eq!(apart[0], apart[1], "copies of the first stage");
    assert_eq!(apart[2], apart[3], "copies of the second stage");
}
