//! Every layout trains as one process does: the same losses and the same parameters.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::sync::Mutex;

use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use common::{LEN, Setup, optimizer, own_batch, step};
use girandole::Layout;
use girandole::comm::Local;
use girandole::pipeline::ScheduleKind;

const STEPS: usize = 20;

struct Trained {
    losses: Vec<f64>,
    evaluated: f64,
    parameters: BTreeMap<String, Vec<f64>>,
}

fn train(layout: &str, schedule: ScheduleKind, dtype: DType, tied: bool) -> Trained {
    let (layout, setup): (Layout, _) =
        (layout.parse().unwrap(), Setup { schedule, dtype, tied, ..Setup::default() });
    let whole: Mutex<BTreeMap<String, Vec<f64>>> = Mutex::default();
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let mut parallel = setup.parallel(comm, &layout, None)?;
        let mut optimizer = optimizer(&parallel)?;
        let steps = (0..STEPS).map(|number| step(&mut parallel, &mut optimizer, number));
        let losses = steps.collect::<girandole::Result<Vec<f64>>>()?;
        let (tokens, targets) = own_batch(&parallel, STEPS)?;
        let evaluated = parallel.evaluate(&tokens, &targets)?.loss;
        for piece in parallel.pieces().into_iter().filter(|piece| piece.writes) {
            let mut whole = whole.lock().unwrap();
            let len = piece.region.dims.iter().product();
            let all = whole.entry(piece.name).or_insert_with(|| vec![f64::NAN; len]);
            let values = piece.var.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let places: Vec<usize> = piece.region.runs.ranges().flatten().collect();
            for (place, value) in places[piece.region.window.clone()].iter().zip(values) {
                assert!(all[*place].is_nan(), "a place is written twice");
                all[*place] = value;
            }
        }
        Ok((losses, evaluated))
    })
    .unwrap();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{layout}: ranks tell other losses");
    let (losses, evaluated) = ranks.into_iter().next().unwrap();
    Trained { losses, evaluated, parameters: whole.into_inner().unwrap() }
}

fn assert_equal(layout: &str, got: &Trained, expected: &Trained, tolerance: f64) {
    for (step, (a, b)) in got.losses.iter().zip(&expected.losses).enumerate() {
        assert!((a - b).abs() < tolerance, "{layout}: step {step}: {a}, expected {b}");
    }
    assert!((got.evaluated - expected.evaluated).abs() < tolerance, "{layout}: evaluated");
    assert_eq!(got.parameters.len(), expected.parameters.len(), "{layout}");
    for (name, expected) in &expected.parameters {
        let got = &got.parameters[name];
        assert_eq!(got.len(), expected.len(), "{layout}: {name}");
        let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < tolerance, "{layout}: {name} is {gap} off"); // also where a place was not written
        assert!(got.iter().all(|value| !value.is_nan()), "{layout}: {name} has holes");
    }
}

const LAYOUTS: [&str; 24] = [
    "dp=2",
    "dp=4",
    "dp=8",
    "shard=2",
    "shard=4",
    "shard=8",
    "dp=2,shard=2",
    "dp=2,shard=4",
    "tp=2",
    "tp=4",
    "tp=8",
    "dp=2,tp=2",
    "shard=2,tp=2",
    "dp=2,shard=2,tp=2",
    "pp=2",
    "pp=4",
    "pp=2,dp=2",
    "pp=2,shard=2",
    "pp=2,tp=2",
    "pp=4,shard=2",
    "pp=2,shard=4",
    "pp=2,dp=2,shard=2",
    "pp=2,shard=2,tp=2",
    "pp=2,dp=2,tp=2",
];

#[test]
fn f64_in_every_layout() {
    let expected = train("", ScheduleKind::OneFOneB, DType::F64, true);
    assert!(expected.losses[STEPS - 1] < expected.losses[0]);
    for layout in LAYOUTS {
        let got = train(layout, ScheduleKind::OneFOneB, DType::F64, true);
        assert_equal(layout, &got, &expected, 1e-10);
    }
}

#[test]
fn f32_in_every_layout() {
    let expected = train("", ScheduleKind::OneFOneB, DType::F32, false);
    for layout in LAYOUTS {
        assert_equal(layout, &train(layout, ScheduleKind::OneFOneB, DType::F32, false), &expected, 1e-4);
    }
}

#[test]
fn every_schedule_of_stages_with_shards() {
    let expected = train("", ScheduleKind::OneFOneB, DType::F64, true);
    for schedule in [
        ScheduleKind::Naive,
        ScheduleKind::GPipe,
        ScheduleKind::Interleaved,
        ScheduleKind::LoopedBfs,
        ScheduleKind::ZbH1,
        ScheduleKind::ZbV,
    ] {
        for layout in ["pp=2", "pp=2,shard=2", "pp=2,dp=2", "pp=2,tp=2"] {
            assert_equal(layout, &train(layout, schedule, DType::F64, true), &expected, 1e-10);
        }
    }
}

#[test]
fn a_micro_batch_without_targets_changes_nothing() {
    let train = |layout: &str| {
        let (layout, setup): (Layout, _) = (layout.parse().unwrap(), Setup::default());
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let mut parallel = setup.parallel(comm, &layout, None)?;
            let mut optimizer = optimizer(&parallel)?;
            let losses = (0..3).map(|number| {
                let (tokens, targets) = own_batch(&parallel, number)?;
                // Of the first of two ranks, all of the second micro-batch.
                let ignored = Tensor::full(-100i64, (2, LEN), &Device::Cpu)?;
                if parallel.data_ranks().rank() == 0 {
                    targets.slice_set(&ignored, 0, 2)?;
                }
                let mut step = parallel.step(&tokens, &targets)?;
                parallel.clip_grad_norm(&mut step.grads, 0.5)?;
                optimizer.step(&step.grads)?;
                Ok(step.loss)
            });
            losses.collect::<girandole::Result<Vec<f64>>>().map_err(Into::into)
        });
        ranks.unwrap().remove(0)
    };
    let expected = train("");
    for layout in ["dp=2", "shard=2", "shard=2,tp=2", "pp=2,dp=2", "pp=2,shard=2"] {
        for (a, b) in train(layout).iter().zip(&expected) {
            assert!((a - b).abs() < 1e-10, "{layout}: {a}, expected {b}");
        }
    }
}
