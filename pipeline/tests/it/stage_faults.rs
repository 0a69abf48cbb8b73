//! A failure ends the step on every rank, quickly, with an error that states the cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, func};
use comm::{InitMethod, Local, LocalConfig, Secret, Tcp, TcpConfig, Transport};
use pipeline::{Modules, Pipeline, PipelineConfig, Result, ScheduleKind, Split};

use crate::common::{Comm, ROWS, WIDTH, batch, in_stages, loss, modules, weights};

/// Runs `body` on each rank of a group of threads, and returns the results; `None` for a rank that panicked.
fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Comm) -> Result<T> + Sync) -> Vec<Option<Result<T>>> {
    on_ranks_with(ranks, &LocalConfig::default(), body)
}

fn on_ranks_with<T: Send>(
    ranks: usize,
    config: &LocalConfig,
    body: impl Fn(Comm) -> Result<T> + Sync,
) -> Vec<Option<Result<T>>> {
    let group = Local::group(ranks, config).unwrap();
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            group.into_iter().map(|comm| scope.spawn(move || body(Arc::new(comm)))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

/// Does the same over sockets, or over shared memory where available.
fn on_sockets<T: Send>(
    ranks: usize,
    transport: Transport,
    body: impl Fn(Comm) -> Result<T> + Sync,
) -> Vec<Option<Result<T>>> {
    let (folder, secret) = (tempfile::tempdir().unwrap(), Secret::random().unwrap());
    let rank = |rank: usize| {
        let config = TcpConfig {
            rank,
            world_size: ranks,
            secret: Some(secret.clone()),
            init_method: InitMethod::File(folder.path().join("meeting")),
            transport,
            ..TcpConfig::default()
        };
        body(Arc::new(Tcp::connect(&config).unwrap()))
    };
    let rank = &rank;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks).map(|place| scope.spawn(move || rank(place))).collect();
        threads.into_iter().map(|thread| thread.join().ok()).collect()
    })
}

fn make(comm: Comm, modules: &Modules, config: &PipelineConfig) -> Result<Pipeline> {
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).unwrap();
    Pipeline::new(comm, modules, &weights(), &example, loss, config)
}

fn lines<T: std::fmt::Debug>(results: Vec<Option<Result<T>>>) -> Vec<String> {
    results.into_iter().map(|result| result.unwrap().unwrap_err().to_string()).collect()
}

#[test]
fn what_cannot_be_made_is_the_same_error_everywhere() {
    let base = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
    let split = |name: &str| PipelineConfig { split: Split::at([name]), ..base.clone() };
    let few =
        PipelineConfig { stages_per_rank: Some(5), schedule: ScheduleKind::Interleaved, ..base.clone() };
    let tied = PipelineConfig { tied: vec![("blocks.0.fc.weight".into(), "x".into())], ..base.clone() };
    for (config, part) in [
        (
            split("layers.1"),
            "no module layers.1 to be cut at; it has blocks.0.fc, blocks.0.act, blocks.0.plain",
        ),
        (split("blocks.0.fc"), "nothing is before it"),
        (few, "10 stages cannot be made of 8 modules"),
        (PipelineConfig { micro_batches: 0, ..base.clone() }, "micro-batches of a schedule: got 0"),
        (
            PipelineConfig { stages_per_rank: Some(2), ..base.clone() },
            "stages per rank of 1f1b: got 2; it has 1",
        ),
        (tied, "no stage has a variable x"),
    ] {
        for line in lines(on_ranks(2, |comm| make(comm, &modules(2), &config))) {
            assert!(line.contains(part), "{line}");
        }
    }
}

#[test]
fn two_modules_of_one_name_are_refused() {
    let twice = || modules(1).module("blocks.0.act", |_| Ok(func(Tensor::tanh)));
    for line in lines(on_ranks(2, |comm| make(comm, &twice(), &PipelineConfig::default()))) {
        assert!(line.contains("blocks.0.act twice") && line.contains("a name of its own"), "{line}");
    }
}

#[test]
fn variables_of_two_modules_with_one_name_are_refused() {
    let linear = |vb| ops::linear(WIDTH, WIDTH, vb);
    let deep = move |vb: VarBuilder<'static>| linear(vb.pp("b"));
    let shared = || Modules::new().module("a", deep).module("a.b", linear).module("c", linear);
    for (ranks, cut) in [(1, None), (2, Some("a.b")), (2, Some("c"))] {
        let config = PipelineConfig {
            split: cut.map_or(Split::default(), |cut| Split::at([cut])),
            ..PipelineConfig::default()
        };
        for line in lines(on_ranks(ranks, |comm| make(comm, &shared(), &config))) {
            assert!(line.contains("a.b.bias in module a and in module a.b; name one of them"), "{line}");
        }
    }
    // A name that is a prefix of another one is allowed if their variables differ.
    let apart = || Modules::new().module("a", linear).module("a.b", linear);
    for made in on_ranks(2, |comm| make(comm, &apart(), &PipelineConfig::default()).map(drop)) {
        made.unwrap().unwrap();
    }
}

#[test]
fn a_stage_that_does_not_fit_is_named_by_all() {
    let unfit = || {
        let linear = |vb| ops::linear(WIDTH + 1, WIDTH, vb);
        Modules::new().module("a", |_| Ok(func(Tensor::tanh))).module("b", linear)
    };
    for line in lines(on_ranks(2, |comm| make(comm, &unfit(), &PipelineConfig::default()))) {
        assert!(
            line.contains("stage 1 on rank 1 fails on an input of f64 [2, 6]: linear: input must be"),
            "{line}"
        );
    }
    let whole = || {
        let rounded = |x: &Tensor| x.to_dtype(DType::U32);
        Modules::new().module("a", move |_| Ok(func(rounded))).module("b", |_| Ok(func(Tensor::tanh)))
    };
    for line in lines(on_ranks(2, |comm| make(comm, &whole(), &PipelineConfig::default()))) {
        assert!(line.contains("floating-point"), "{line}");
    }
}

#[test]
fn batches_that_do_not_fit() {
    let config = PipelineConfig { micro_batches: 4, ..PipelineConfig::default() };
    let results = on_ranks(2, |comm| {
        let rank = comm.rank();
        let mut pipeline = make(comm, &modules(1), &config)?;
        let (x, y) = batch(0, 7).unwrap();
        let error = pipeline.step(Some(&x), Some(&y)).unwrap_err();
        let what = if rank == 0 { "input" } else { "target" };
        let expected = format!("the {what} has 7 rows, which are no 4 micro-batches of 2 rows each");
        assert!(error.to_string().contains(&expected), "{error}");
        // Later calls return the same error.
        assert_eq!(pipeline.step(Some(&x), Some(&y)).unwrap_err().to_string(), error.to_string());
        Ok(())
    });
    assert!(results.into_iter().all(|result| result.unwrap().is_ok()));
    let results = on_ranks(2, |comm| make(comm, &modules(1), &config)?.step(None, None).map(|_| ()));
    let expected =
        ["rank 0 has the first stage and needs the input", "rank 1 has the last stage and needs the target"];
    for (line, expected) in lines(results).iter().zip(expected) {
        assert!(line.contains(expected), "{line}");
    }
}

/// The third rank's module returns another shape in its third forward pass.
fn changing(dims: (usize, usize)) -> Modules {
    changing_at(2, 4, dims)
}

/// Does the same at one of several stages.
fn changing_at(odd: usize, stages: usize, dims: (usize, usize)) -> Modules {
    let calls = Arc::new(AtomicUsize::new(0));
    let moody = move |x: &Tensor| match calls.fetch_add(1, Ordering::Relaxed) {
        // The first call is the dry run.
        3 => x.flatten_all()?.narrow(0, 0, dims.0 * dims.1)?.reshape(dims),
        _ => Ok(x.clone()),
    };
    let moody = Arc::new(moody);
    (0..stages).fold(Modules::new(), |modules, stage| {
        let moody = moody.clone();
        modules.module(&format!("m{stage}"), move |vb| {
            let (linear, moody) = (ops::linear(WIDTH, WIDTH, vb)?, moody.clone());
            Ok(func(move |x| {
                let y = candle_nn::Module::forward(&linear, x)?;
                if stage == odd { moody(&y) } else { Ok(y) }
            }))
        })
    })
}

#[test]
fn a_stage_that_changes_its_shape_is_the_same_error_everywhere() {
    // The second shape has as many elements as the correct one.
    for dims in [(2, 2), (6, 2)] {
        for schedule in ScheduleKind::ALL {
            let stages_per_rank = (schedule != ScheduleKind::ZbV).then_some(1);
            let ranks = if stages_per_rank.is_some() { 4 } else { 2 };
            let config =
                PipelineConfig { schedule, stages_per_rank, micro_batches: 6, ..PipelineConfig::default() };
            let began = Instant::now();
            let results = on_ranks(ranks, |comm| {
                let mut pipeline = make(comm, &changing(dims), &config)?;
                let (x, y) = batch(0, 12).unwrap();
                (0..3).try_for_each(|_| pipeline.step(Some(&x), Some(&y)).map(|_| ()))
            });
            let (a, b) = dims;
            let cause = format!("stage 2 gave an output of f64 [{a}, {b}] for micro-batch 2, and f64 [2, 6]");
            let owner = if ranks == 4 { 2 } else { 1 };
            for (rank, result) in results.into_iter().enumerate() {
                let error = result.unwrap().unwrap_err();
                let line = error.to_string();
                if rank == owner {
                    assert!(line.starts_with(&cause), "{schedule}: {line}");
                } else {
                    let expected = format!("rank {owner} could not go on: {cause}");
                    assert!(line.starts_with(&expected), "{schedule}, rank {rank}: {line}");
                    assert!(error.is_peer_failure());
                }
            }
            assert!(began.elapsed() < Duration::from_secs(30), "{schedule} hung");
        }
    }
}

#[test]
fn the_cause_reaches_all_ranks_over_sockets_too() {
    let config = PipelineConfig { micro_batches: 6, ..PipelineConfig::default() };
    // The other ranks are up to five ranks away, and get the cause from neighbours that had to wait for theirs.
    for (transport, ranks, odd) in [
        (Transport::Tcp, 4, 2),
        (Transport::Auto, 4, 2),
        (Transport::Tcp, 6, 5),
        (Transport::Auto, 6, 5),
        (Transport::Tcp, 6, 0),
    ] {
        let results = on_sockets(ranks, transport, |comm| {
            let mut pipeline = make(comm, &changing_at(odd, ranks, (2, 2)), &config)?;
            let (x, y) = batch(0, 12).unwrap();
            (0..3).try_for_each(|_| pipeline.step(Some(&x), Some(&y)).map(|_| ()))
        });
        for (rank, line) in lines(results).into_iter().enumerate() {
            let told = if rank == odd { String::new() } else { format!("rank {odd} could not go on: ") };
            let expected = format!("{told}stage {odd} gave an output of f64 [2, 2] for micro-batch 2");
            assert!(line.starts_with(&expected), "{transport:?}, {ranks} ranks, rank {rank}: {line}");
        }
    }
}

/// Linear layers, the first and the last with one weight; backward through the first module fails at its third micro-batch.
fn failing_backward() -> Modules {
    let calls = Arc::new(AtomicUsize::new(0));
    let weight = |vb: candle_nn::VarBuilder<'static>| vb.get((WIDTH, WIDTH), "weight");
    Modules::new()
        .module("first", move |vb| {
            let (weight, calls) = (weight(vb)?, calls.clone());
            Ok(func(move |x| {
                let (y, calls) = (x.matmul(&weight)?, calls.clone());
                let backward = move |gradient: &Tensor| match calls.fetch_add(1, Ordering::Relaxed) {
                    2 => Err(candle_core::Error::Msg("out of luck".into()).into()),
                    _ => Ok(vec![Some(gradient.clone())]),
                };
                Ok(comm::autograd::custom("unlucky", &[&y], y.detach().copy()?, backward)?)
            }))
        })
        .module("middle", |vb| ops::linear(WIDTH, WIDTH, vb))
        .module("last", move |vb| {
            let weight = weight(vb)?;
            Ok(func(move |x| x.matmul(&weight)))
        })
}

#[test]
fn a_rank_that_waits_for_a_tied_variable_hears_the_cause() {
    let tied = vec![("first.weight".to_string(), "last.weight".to_string())];
    let config = PipelineConfig { micro_batches: 3, tied, ..PipelineConfig::default() };
    let timeout = LocalConfig { timeout: Duration::from_secs(20), ..LocalConfig::default() };
    for ranks in 2..=3 {
        // Whether the failed rank keeps its pipeline until the others have ended.
        for keeps in [true, false] {
            let ended = std::sync::Barrier::new(ranks);
            let results = on_ranks_with(ranks, &timeout, |comm| {
                let mut pipeline = make(comm, &failing_backward(), &config)?;
                let (x, y) = batch(0, 3 * ROWS).unwrap();
                let result = (0..2).try_for_each(|_| pipeline.step(Some(&x), Some(&y)).map(|_| ()));
                if keeps {
                    ended.wait();
                }
                result
            });
            for (rank, line) in lines(results).into_iter().enumerate() {
                assert!(line.contains("out of luck"), "{ranks} ranks, rank {rank}: {line}");
                let told = line.starts_with("rank 0 could not go on: ");
                assert_eq!(told, rank != 0, "{ranks} ranks, rank {rank}: {line}");
            }
        }
    }
}

#[test]
fn ranks_that_were_told_different_things_all_say_which() {
    let base = PipelineConfig { micro_batches: 4, ..PipelineConfig::default() };
    for (other, part) in [
        (PipelineConfig { micro_batches: 2, ..base.clone() }, "micro-batches is 2 on rank 1 and 4 on rank 0"),
        (
            PipelineConfig { schedule: ScheduleKind::GPipe, ..base.clone() },
            "the schedule is gpipe, its actions",
        ),
        (
            PipelineConfig { split: Split::at(["blocks.0.act"]), ..base.clone() },
            "the split is At([\"blocks.0.act",
        ),
    ] {
        let of = |rank: usize| if rank == 1 { &other } else { &base };
        let results = on_ranks(3, |comm| make(comm.clone(), &modules(2), of(comm.rank())).map(|_| ()));
        for line in lines(results) {
            assert!(
                line.starts_with("the ranks do not agree on the pipeline: ") && line.contains(part),
                "{line}"
            );
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_by_all() {
    for schedule in ScheduleKind::ALL {
        for victim in 0..4 {
            let config = PipelineConfig { schedule, micro_batches: 8, ..PipelineConfig::default() };
            let began = Instant::now();
            let results = on_ranks(4, |comm| {
                let rank = comm.rank();
                let mut pipeline = make(comm, &modules(3), &config)?;
                let count = AtomicUsize::new(0);
                pipeline.before_forward(move |_| {
                    assert!(rank != victim || count.fetch_add(1, Ordering::Relaxed) < 11, "dies");
                });
                let (x, y) = batch(0, 16).unwrap();
                (0..3).try_for_each(|_| pipeline.step(Some(&x), Some(&y)).map(|_| ()))
            });
            for (rank, result) in results.into_iter().enumerate() {
                match result {
                    None => assert_eq!(rank, victim),
                    Some(result) => {
                        let line = result.unwrap_err().to_string();
                        assert!(
                            line.contains(&format!("rank {victim} (")),
                            "{schedule}, rank {rank}: {line}"
                        );
                        assert!(line.contains("died"), "{schedule}, rank {rank}: {line}");
                    }
                }
            }
            assert!(began.elapsed() < Duration::from_secs(30), "{schedule} hung");
        }
    }
}

#[test]
fn all_is_well_with_nothing_wrong() {
    let config = PipelineConfig { micro_batches: 2, ..PipelineConfig::default() };
    assert!(
        on_ranks(3, |comm| in_stages(comm, 2, &config)).into_iter().all(|result| result.unwrap().is_ok())
    );
}
