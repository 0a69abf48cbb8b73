//! Every layout trains as one process does: the same losses and the same parameters.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Mutex;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::Optimizer;
use comm::Local;
use girandole::training::{Adam, AdamConfig};
use girandole::{Layout, Parallel, ParallelConfig, comm, models, pipeline};
use models::{CausalLm, ModelConfig, Weights};
use pipeline::ScheduleKind;

const ROWS: usize = 8;
const LEN: usize = 6;
const STEPS: usize = 20;

/// With a head of its own, or one that is the embedding; the second has norms of queries and keys, of which each rank has a part of the
/// gradient.
fn config(tied: bool) -> ModelConfig {
    let family = if tied { "qwen3" } else { "llama" };
    let json = format!(
        r#"{{"model_type": "{family}", "head_dim": 4, "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6,
             "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 16,
             "rms_norm_eps": 1e-5, "initializer_range": 0.2, "tie_word_embeddings": {tied}, "rope_theta": 10000.0}}"#
    );
    ModelConfig::from_json(&json).unwrap()
}

/// The rows of a step; some targets do not count, and not as many in each row.
fn batch(step: usize) -> (Tensor, Tensor) {
    let token = |i: usize| ((i * 7 + step * 11 + i * i % 5) % 48) as u32;
    let tokens: Vec<u32> = (0..ROWS * LEN).map(token).collect();
    let targets = (0..ROWS * LEN).map(|i| match (i / LEN + i) % 4 {
        0 if i / LEN != 3 => -100,
        _ => i64::from((token(i) * 3 + 1) % 48),
    });
    let targets: Vec<i64> = targets.collect();
    (
        Tensor::from_vec(tokens, (ROWS, LEN), &Device::Cpu).unwrap(),
        Tensor::from_vec(targets, (ROWS, LEN), &Device::Cpu).unwrap(),
    )
}

struct Trained {
    losses: Vec<f64>,
    evaluated: f64,
    parameters: BTreeMap<String, Vec<f64>>,
}

/// AdamW that decays matrices alone.
fn optimizers(groups: [Vec<(String, Var)>; 2]) -> Result<[Adam; 2]> {
    let [matrices, others] = groups;
    let of = |vars, weight_decay| {
        let config = AdamConfig { learning_rate: 0.01, weight_decay, ..AdamConfig::adamw() };
        Ok::<_, candle_core::Error>(Adam::named(vars, config)?)
    };
    Ok([of(matrices, 0.1)?, of(others, 0.0)?])
}

fn train(layout: &str, schedule: ScheduleKind, dtype: DType, tied: bool) -> Trained {
    let layout: Layout = layout.parse().unwrap();
    let config = config(tied);
    let whole: Mutex<BTreeMap<String, Vec<f64>>> = Mutex::default();
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let weights = Weights::random(&config, 7).unwrap();
        let rows = ROWS / layout.data_ranks();
        let micro_batches = if rows.is_multiple_of(2) { 2 } else { 1 };
        let example = Tensor::zeros((rows / micro_batches, LEN), DType::U32, &Device::Cpu)?;
        let settings = ParallelConfig {
            dtype,
            micro_batches,
            example: Some(example),
            schedule,
            ..ParallelConfig::default()
        };
        let model = config.clone();
        let build = move |builder: &_| CausalLm::new(&model, builder);
        let mut parallel = Parallel::new(comm, &layout, weights.parts(), &settings, build)?;
        let mut optimizers = optimizers(parallel.parameter_groups())?;
        let own = parallel.data_ranks().rank() * rows;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let (tokens, targets) = batch(step);
            let part = |all: &Tensor| all.narrow(0, own, rows)?.contiguous();
            let mut step = parallel.step(&part(&tokens)?, &part(&targets)?)?;
            parallel.clip_grad_norm(&mut step.grads, 0.5)?;
            for optimizer in &mut optimizers {
                optimizer.step(&step.grads)?;
            }
            losses.push(step.loss);
        }
        let (tokens, targets) = batch(STEPS);
        let evaluated = parallel.evaluate(&tokens.narrow(0, own, rows)?, &targets.narrow(0, own, rows)?)?;
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
