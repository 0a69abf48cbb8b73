//! Every layout trains like one process: the same losses and the same parameters.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Mutex;

use crate::common::{LEN, ROWS, Setup, optimizer, own_batch, own_batch_of, own_rows, step_of};
use candle_core::{DType, Device, Tensor};
use candle_nn::Optimizer;
use girandole::comm::Local;
use girandole::context_parallel::ContextParallel;
use girandole::models::{GenerateConfig, generate};
use girandole::ops::{BalanceLoss, EXPERT_CORRECTION, RowContext, activation_bytes};
use girandole::pipeline::ScheduleKind;
use girandole::{DistributedModel, Layout, Recompute};

const STEPS: usize = 20;
/// Where something is changed that every step has: a first step, one with what the first has left behind, and one more.
const FEW_STEPS: usize = 3;

pub(crate) struct Trained {
    pub(crate) losses: Vec<f64>,
    evaluated: f64,
    pub(crate) parameters: BTreeMap<String, Vec<f64>>,
}

pub(crate) fn train_as(layout: &str, setup: Setup) -> Trained {
    train_for(FEW_STEPS, layout, setup)
}

fn train_for(steps: usize, layout: &str, setup: Setup) -> Trained {
    let layout: Layout = layout.parse().unwrap();
    let whole: Mutex<BTreeMap<String, Vec<f64>>> = Mutex::default();
    let ranks = Local::run_shared(layout.ranks(), |comm| {
        let mut parallel = setup.parallel(comm, &layout, None)?;
        let mut optimizer = optimizer(&parallel)?;
        let losses = (0..steps).map(|number| step_of(&mut parallel, &mut optimizer, number, &setup));
        let losses = losses.collect::<girandole::Result<Vec<f64>>>()?;
        let evaluated = parallel.evaluate_batch(&own_rows(&parallel, steps, &setup)?)?.loss;
        for piece in
            parallel.pieces()?.into_iter().filter(|piece| piece.is_first && parallel.copy().number == 0)
        {
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

pub(crate) fn assert_equal(layout: &str, got: &Trained, expected: &Trained, tolerance: f64) {
    for (step, (a, b)) in got.losses.iter().zip(&expected.losses).enumerate() {
        assert!((a - b).abs() < tolerance, "{layout}: step {step}: {a}, expected {b}");
    }
    assert!((got.evaluated - expected.evaluated).abs() < tolerance, "{layout}: evaluated");
    assert_eq!(got.parameters.len(), expected.parameters.len(), "{layout}");
    for (name, expected) in &expected.parameters {
        let got = &got.parameters[name];
        assert_eq!(got.len(), expected.len(), "{layout}: {name}");
        let gap = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(gap < tolerance, "{layout}: {name} is {gap} off"); // Also fails if an element was not written.
        assert!(got.iter().all(|value| !value.is_nan()), "{layout}: {name} has holes");
    }
}

/// Those that every capability goes through.
pub(crate) const LAYOUTS: [&str; 27] = [
    "dp=2", "dp=4", "shard=2", "shard=4", "dp=2,shard=2", "tp=2", "tp=4", "dp=2,tp=2", "shard=2,tp=2",
    "dp=2,shard=2,tp=2", "pp=2", "pp=4", "pp=2,dp=2", "pp=2,shard=2", "pp=2,tp=2", "pp=2,dp=2,shard=2",
    "pp=2,shard=2,tp=2", "pp=2,dp=2,tp=2", "cp=2", "cp=3", "cp=4", "dp=2,cp=2", "shard=2,cp=2", "cp=2,tp=2",
    "pp=2,cp=2", "pp=2,shard=2,cp=2", "pp=2,cp=2,tp=2",
];

/// More ranks along one axis than the others have: with other rows, weights or models they compute as those with fewer.
const LARGE_LAYOUTS: [&str; 6] = ["dp=8", "shard=8", "dp=2,shard=4", "tp=8", "pp=4,shard=2", "pp=2,shard=4"];

/// Besides 1F1B, which is the default.
pub(crate) const SCHEDULES: [ScheduleKind; 6] = [
    ScheduleKind::Naive,
    ScheduleKind::GPipe,
    ScheduleKind::Interleaved,
    ScheduleKind::LoopedBfs,
    ScheduleKind::ZbH1,
    ScheduleKind::ZbV,
];

/// Those that differ most, where all of them are compared elsewhere (`divided_experts`).
pub(crate) const FEW_SCHEDULES: [ScheduleKind; 4] =
    [ScheduleKind::GPipe, ScheduleKind::Interleaved, ScheduleKind::ZbH1, ScheduleKind::ZbV];

/// With experts divided over ranks: 12 experts, of which 8 ranks have one or two each.
pub(crate) const EXPERT_LAYOUTS: [&str; 20] = [
    "ep=2", "ep=4", "ep=8", "dp=2,ep=2", "ep=2,tp=2", "dp=2,ep=2,tp=2", "cp=2,ep=2", "dp=2,cp=2,ep=2",
    "pp=2,ep=2", "pp=4,ep=2", "pp=2,ep=4", "pp=2,dp=2,ep=2", "pp=2,shard=2,ep=2", "pp=2,ep=2,tp=2",
    "pp=2,cp=2,ep=2", "shard=2,ep=2", "shard=2,ep=4", "dp=2,shard=2,ep=2", "shard=2,ep=2,tp=2",
    "shard=2,cp=2,ep=2",
];

#[test]
fn f64_in_every_layout() {
    let expected = train_for(STEPS, "", Setup::default());
    assert!(expected.losses[STEPS - 1] < expected.losses[0]);
    for layout in LAYOUTS.into_iter().chain(LARGE_LAYOUTS) {
        assert_equal(layout, &train_for(STEPS, layout, Setup::default()), &expected, 1e-10);
    }
}

#[test]
fn f32_in_every_layout() {
    let setup = Setup { dtype: DType::F32, tied: false, ..Setup::default() };
    let expected = train_as("", setup);
    for layout in LAYOUTS.into_iter().chain(LARGE_LAYOUTS) {
        assert_equal(layout, &train_as(layout, setup), &expected, 1e-4);
    }
}

/// Also experts that no token of a rank has chosen.
#[test]
fn experts_in_every_layout() {
    let plain = Setup { experts: true, ..Setup::default() };
    for setup in [plain, Setup { packed: true, ..plain }] {
        let expected = train_as("", setup);
        let all = || LAYOUTS.into_iter().chain(EXPERT_LAYOUTS);
        for layout in all() {
            assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
        }
        let divided = Setup { sequence_parallel: true, ..setup };
        for layout in all().filter(|layout| layout.contains("tp=2")) {
            assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
        }
        for recompute in [Recompute::Units, Recompute::Selective, Recompute::Every(2)] {
            for (layout, setup) in [
                ("", setup),
                ("shard=2", setup),
                ("pp=2", setup),
                ("pp=2,tp=2", setup),
                ("tp=2", divided),
                ("dp=2,ep=2", setup),
                ("cp=2,ep=2", setup),
                ("ep=2,tp=2", divided),
                ("pp=2,ep=2", setup),
                ("pp=2,ep=2,tp=2", divided),
                ("shard=2,ep=2", setup),
                ("shard=2,ep=2,tp=2", divided),
            ] {
                assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
            }
        }
        for schedule in FEW_SCHEDULES {
            for (layout, setup) in
                [("pp=2", setup), ("pp=2,shard=2", setup), ("pp=2,tp=2", divided), ("pp=2,ep=2", setup)]
            {
                assert_equal(layout, &train_as(layout, Setup { schedule, ..setup }), &expected, 1e-10);
            }
        }
    }
}

/// The loss of rows also with other micro-batches, that of a batch with the same ones.
#[test]
fn balanced_experts_in_every_layout() {
    let plain = train_as("", Setup { experts: true, ..Setup::default() });
    for (balance, micro_batches) in [(BalanceLoss::Row, None), (BalanceLoss::Batch, Some(1))] {
        let (balance, experts) = (Some(balance), true);
        for packed in [false, true] {
            let whole = Setup { balance, experts, packed, micro_batches: Some(1), ..Setup::default() };
            let (expected, setup) = (train_as("", whole), Setup { micro_batches, ..whole });
            let gap =
                expected.parameters.iter().flat_map(|(name, one)| one.iter().zip(&plain.parameters[name]));
            assert!(packed || gap.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) > 1e-4, "nothing is added");
            // Divided experts send tokens of packed rows as any others.
            let divided_experts = EXPERT_LAYOUTS.into_iter().filter(|_| !packed);
            // What documents are is known to each rank that has the whole row.
            let cut = LAYOUTS
                .into_iter()
                .filter(|layout| !packed || layout.contains("cp") || layout.contains("pp"));
            for layout in cut.chain(divided_experts) {
                assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
            }
            let divided = Setup { sequence_parallel: true, ..setup };
            let all = LAYOUTS.into_iter().chain(EXPERT_LAYOUTS);
            for layout in all.filter(|layout| layout.contains("tp=2")) {
                assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
            }
            for recompute in [Recompute::Units, Recompute::Selective] {
                for (layout, setup) in [
                    ("", setup),
                    ("shard=2", setup),
                    ("pp=2", setup),
                    ("cp=2", setup),
                    ("tp=2", divided),
                    ("ep=2", setup),
                    ("pp=2,ep=2", setup),
                    ("shard=2,ep=2", setup),
                ] {
                    assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
                }
            }
        }
        // Ranks with 3, 3 and 2 of the 8 rows.
        let one = Setup { balance, experts, micro_batches: Some(1), ..Setup::default() };
        let expected = train_as("", one);
        for layout in ["dp=3", "shard=3", "ep=3", "dp=3,cp=2"] {
            assert_equal(layout, &train_as(layout, one), &expected, 1e-10);
        }
        let two = Setup { balance, experts, micro_batches: Some(2), ..Setup::default() };
        let expected = train_as("", two);
        for schedule in FEW_SCHEDULES {
            for layout in ["pp=2", "pp=2,shard=2", "pp=2,tp=2", "pp=2,cp=2", "pp=2,dp=2", "pp=2,ep=2"] {
                assert_equal(layout, &train_as(layout, Setup { schedule, ..two }), &expected, 1e-10);
            }
        }
    }
}

/// Latent attention, experts chosen by sigmoids in groups, and corrections that move by the loads of all ranks and micro-batches.
#[test]
fn corrected_experts_and_latent_attention_in_every_layout() {
    let plain = Setup { deepseek: true, ..Setup::default() };
    for setup in [plain, Setup { packed: true, balance: Some(BalanceLoss::Row), ..plain }] {
        let expected = train_as("", Setup { micro_batches: Some(1), ..setup });
        let corrections = expected.parameters.iter().filter(|(name, _)| name.ends_with(EXPERT_CORRECTION));
        let moved = corrections.flat_map(|(_, values)| values).filter(|value| value.abs() > 0.005).count();
        assert!(moved > 30, "{moved} of 60 corrections have moved");
        let all = || LAYOUTS.into_iter().chain(EXPERT_LAYOUTS);
        for layout in all() {
            assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
        }
        let divided = Setup { sequence_parallel: true, ..setup };
        for layout in all().filter(|layout| layout.contains("tp=2")) {
            assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
        }
        for recompute in [Recompute::Units, Recompute::Selective] {
            for (layout, setup) in
                [("", setup), ("shard=2", setup), ("pp=2", setup), ("cp=2", setup), ("tp=2", divided)]
            {
                assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
            }
        }
        for schedule in
            [ScheduleKind::GPipe, ScheduleKind::Interleaved, ScheduleKind::ZbH1, ScheduleKind::ZbV]
        {
            for layout in ["pp=2", "pp=2,shard=2", "pp=2,tp=2"] {
                assert_equal(layout, &train_as(layout, Setup { schedule, ..setup }), &expected, 1e-10);
            }
        }
    }
}

#[test]
fn every_schedule_of_stages_with_shards() {
    let expected = train_as("", Setup::default());
    for schedule in SCHEDULES {
        for layout in ["pp=2", "pp=2,shard=2", "pp=2,dp=2", "pp=2,tp=2", "pp=2,cp=2"] {
            assert_equal(layout, &train_as(layout, Setup { schedule, ..Setup::default() }), &expected, 1e-10);
        }
    }
}

/// Sequence parallelism with each of the three models, also with recomputation.
#[test]
fn sequences_are_divided_with_layers() {
    let qwen3 = Setup { sequence_parallel: true, ..Setup::default() };
    let gpt2 = Setup { gpt2: true, ..qwen3 };
    let llama = Setup { tied: false, dtype: DType::F32, ..qwen3 };
    for (setup, tolerance) in [(qwen3, 1e-10), (gpt2, 1e-10), (llama, 1e-4)] {
        let expected = train_as("", Setup { sequence_parallel: false, ..setup });
        for layout in LAYOUTS.into_iter().filter(|layout| layout.contains("tp=2")) {
            assert_equal(layout, &train_as(layout, setup), &expected, tolerance);
        }
    }
    // Length 8, because 4 or 8 ranks do not divide 6 positions.
    for setup in [qwen3, gpt2].map(|setup| Setup { len: 8, ..setup }) {
        let expected = train_as("", Setup { sequence_parallel: false, ..setup });
        for (layout, recompute) in [
            ("tp=4", Recompute::None),
            ("tp=8", Recompute::None),
            ("tp=4", Recompute::Selective),
            ("shard=2,tp=2", Recompute::Units),
            ("shard=2,tp=2", Recompute::Selective),
            ("pp=2,tp=2", Recompute::Selective),
            ("cp=2,tp=4", Recompute::Selective),
            ("shard=2,cp=2,tp=2", Recompute::Units),
        ] {
            assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
        }
    }
    // Without tensor parallelism it has no effect.
    let expected = train_as("", Setup::default());
    assert_equal("dp=2", &train_as("dp=2", qwen3), &expected, 1e-10);
}

/// Dropout drops the same elements of a row whichever rank has it, in whichever micro-batch, and however its layers are
/// divided.
#[test]
fn dropout_in_every_layout() {
    let gpt2 = Setup { gpt2: true, dropout: 0.2, ..Setup::default() };
    let qwen3 = Setup { gpt2: false, ..gpt2 };
    for setup in [gpt2, qwen3] {
        let (expected, without) = (train_as("", setup), train_as("", Setup { dropout: 0.0, ..setup }));
        assert!((expected.losses[0] - without.losses[0]).abs() > 1e-3, "nothing is dropped");
        for layout in LAYOUTS {
            assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
        }
        for layout in ["tp=2", "dp=2,tp=2", "shard=2,tp=2", "pp=2,tp=2", "cp=2,tp=2"] {
            let divided = Setup { sequence_parallel: true, ..setup };
            assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
        }
        for recompute in [Recompute::Units, Recompute::Selective, Recompute::Every(2)] {
            for layout in ["", "shard=2", "pp=2", "pp=2,tp=2", "cp=2", "pp=2,cp=2"] {
                assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
            }
        }
        for schedule in [ScheduleKind::GPipe, ScheduleKind::ZbV] {
            assert_equal("pp=2", &train_as("pp=2", Setup { schedule, ..setup }), &expected, 1e-10);
        }
    }
}

/// The documents of packed rows travel with them: over ranks, micro-batches, stages and recomputation, also with dropout.
#[test]
fn packed_rows_in_every_layout() {
    let gpt2 = Setup { gpt2: true, packed: true, ..Setup::default() };
    let qwen3 = Setup { gpt2: false, ..gpt2 };
    let mistral = Setup { mistral: true, ..qwen3 };
    for setup in [gpt2, qwen3, mistral] {
        let (expected, streams) = (train_as("", setup), train_as("", Setup { packed: false, ..setup }));
        assert!((expected.losses[0] - streams.losses[0]).abs() > 1e-3, "documents see each other");
        for layout in LAYOUTS {
            assert_equal(layout, &train_as(layout, setup), &expected, 1e-10);
        }
        let divided = Setup { sequence_parallel: true, ..setup };
        for layout in LAYOUTS.into_iter().filter(|layout| layout.contains("tp=2")) {
            assert_equal(layout, &train_as(layout, divided), &expected, 1e-10);
        }
        for recompute in [Recompute::Units, Recompute::Selective, Recompute::Every(2)] {
            for (layout, setup) in [
                ("", setup),
                ("shard=2", setup),
                ("pp=2", setup),
                ("cp=2", setup),
                ("pp=2,cp=2", setup),
                ("pp=2,tp=2", setup),
                ("tp=2", divided),
                ("cp=2,tp=2", divided),
            ] {
                assert_equal(layout, &train_as(layout, Setup { recompute, ..setup }), &expected, 1e-10);
            }
        }
        for schedule in SCHEDULES {
            for (layout, setup) in
                [("pp=2", setup), ("pp=2,shard=2", setup), ("pp=2,cp=2", setup), ("pp=2,tp=2", divided)]
            {
                assert_equal(layout, &train_as(layout, Setup { schedule, ..setup }), &expected, 1e-10);
            }
        }
        let dropped = Setup { dropout: 0.2, ..setup };
        let expected = train_as("", dropped);
        for layout in ["dp=2", "shard=2,tp=2", "pp=2,dp=2", "cp=2", "pp=2,cp=2"] {
            assert_equal(layout, &train_as(layout, dropped), &expected, 1e-10);
        }
    }
}

#[test]
fn dropout_is_of_the_seed_and_the_step_and_not_in_evaluation() {
    let setup = Setup { gpt2: true, dropout: 0.2, ..Setup::default() };
    let losses = Local::run_shared(1, |comm| {
        let mut parallel = setup.parallel(comm, &"".parse()?, None)?;
        let (tokens, targets) = own_batch(&parallel, 0)?;
        let mut loss = |step: u64| {
            parallel.set_next_step(step);
            Ok::<_, girandole::Error>(parallel.step(&tokens, &targets)?.loss)
        };
        let losses = [loss(0)?, loss(1)?, loss(0)?];
        // Steps are counted automatically.
        let next = parallel.step(&tokens, &targets)?.loss;
        let evaluated = parallel.evaluate(&tokens, &targets)?.loss;
        Ok((losses, next, evaluated))
    });
    let ([first, second, again], next, evaluated) = losses.unwrap().remove(0);
    assert_eq!((first, second), (again, next));
    assert!(first != second && first != evaluated);
    let plain = Local::run_shared(1, |comm| {
        let mut parallel = Setup { dropout: 0.0, ..setup }.parallel(comm, &"".parse()?, None)?;
        let (tokens, targets) = own_batch(&parallel, 0)?;
        Ok(parallel.evaluate(&tokens, &targets)?.loss)
    });
    assert_eq!(plain.unwrap(), [evaluated]);
}

#[test]
fn every_schedule_with_divided_sequences() {
    let expected = train_as("", Setup::default());
    for schedule in [ScheduleKind::GPipe, ScheduleKind::Interleaved, ScheduleKind::ZbH1, ScheduleKind::ZbV] {
        let setup = Setup { schedule, sequence_parallel: true, ..Setup::default() };
        assert_equal("pp=2,tp=2", &train_as("pp=2,tp=2", setup), &expected, 1e-10);
    }
}

#[test]
fn sequences_that_the_ranks_do_not_divide_are_refused() {
    let said = |layout: &str, len: usize| {
        let layout: Layout = layout.parse().unwrap();
        let said = Local::run_shared(layout.ranks(), |comm| {
            let setup = Setup { sequence_parallel: true, ..Setup::default() };
            let mut parallel = setup.parallel(comm, &layout, None)?;
            let tokens = Tensor::zeros((8, len), DType::U32, &Device::Cpu)?;
            Ok(parallel.step(&tokens, &tokens).map(drop).map_err(|error| error.to_string()))
        });
        said.unwrap()
    };
    assert!(said("tp=2", 4).into_iter().all(|said| said.is_ok()));
    for said in said("tp=2", 5).into_iter().chain(said("tp=4", 6)) {
        let said = said.unwrap_err();
        assert!(said.contains("with sequence parallelism, the length of a sequence: "), "{said}");
    }
    // Generation still works with any length: each rank then computes whole rows.
    let text = |sequence_parallel| {
        let tokens = Local::run_shared(2, |comm| {
            let setup = Setup { sequence_parallel, ..Setup::default() };
            let parallel = setup.parallel(comm, &"tp=2".parse()?, None)?;
            let config = GenerateConfig { max_new_tokens: 5, ..GenerateConfig::default() };
            let model = parallel.model()?;
            let tokens = generate(model.unwrap(), &[1, 7, 9], &config, |_| ControlFlow::Continue(()));
            Ok(tokens.map_err(girandole::Error::from)?)
        });
        tokens.unwrap()
    };
    assert_eq!(text(true), text(false));
}

/// Compares the bytes that a rank's graph holds without and with divided sequences.
#[test]
fn divided_sequences_need_less() {
    let bytes = |sequence_parallel| {
        let bytes = Local::run_shared(4, |comm| {
            let setup = Setup { sequence_parallel, len: 8, ..Setup::default() };
            let parallel = setup.parallel(comm, &"tp=4".parse()?, None)?;
            let ((tokens, targets), model) = (own_batch_of(&parallel, 0, setup.len)?, parallel.model()?);
            Ok(activation_bytes(&model.unwrap().loss(&tokens, &targets)?, []))
        });
        bytes.unwrap()[0]
    };
    let [whole, divided] = [bytes(false), bytes(true)];
    assert!(divided < whole * 3 / 4, "{divided} of {whole}");
}

/// What the graph of a rank of `cp` holds grows with the length of rows as its part of what one process holds. (What does not grow
/// are copies of parameters.)
#[test]
fn divided_rows_need_a_part_of_the_activations() {
    for recompute in [Recompute::None, Recompute::Units, Recompute::Selective] {
        let bytes_of = |layout: &str, len: usize| {
            let layout: Layout = layout.parse().unwrap();
            let bytes = Local::run_shared(layout.ranks(), |comm| {
                let setup = Setup { len, recompute, ..Setup::default() };
                let parallel = setup.parallel(comm.clone(), &layout, None)?;
                let context = ContextParallel::new(layout.mesh(comm)?.axis("cp")?.clone());
                let divided = context.divide(setup.len, None)?;
                let (tokens, targets) = own_batch_of(&parallel, 0, setup.len)?;
                let (tokens, targets) = (divided.part_of(&tokens)?, divided.part_of(&targets)?);
                let rows =
                    RowContext { divided: (layout.cp > 1).then_some(divided), ..RowContext::default() };
                let loss = rows.scope(|| parallel.model()?.unwrap().loss(&tokens, &targets))?;
                Ok(activation_bytes(&loss, []) as f64)
            });
            bytes.unwrap()
        };
        let bytes = |layout: &str| -> Vec<f64> {
            let (long, short) = (bytes_of(layout, 16), bytes_of(layout, 8));
            long.into_iter().zip(short).map(|(long, short)| long - short).collect()
        };
        let whole = bytes("")[0];
        for cp in [2, 4] {
            for (rank, own) in bytes(&format!("cp={cp}")).into_iter().enumerate() {
                let share = own * f64::from(cp) / whole;
                assert!(
                    (share - 1.0).abs() < 0.001,
                    "{recompute:?}, cp={cp}, rank {rank}: {share} of its part"
                );
            }
        }
    }
}

#[test]
fn a_micro_batch_without_targets_changes_nothing() {
    let train = |layout: &str, recompute: Recompute| {
        let layout: Layout = layout.parse().unwrap();
        let setup = Setup { recompute, ..Setup::default() };
        let ranks = Local::run_shared(layout.ranks(), |comm| {
            let mut parallel = setup.parallel(comm, &layout, None)?;
            let mut optimizer = optimizer(&parallel)?;
            let losses = (0..3).map(|number| {
                let (tokens, targets) = own_batch(&parallel, number)?;
                // All targets of the second micro-batch of the first of two ranks, which has every second row.
                let ignored = Tensor::full(-100i64, (1, LEN), &Device::Cpu)?;
                let (rank, ranks) = (parallel.data_ranks().rank(), parallel.data_ranks().world_size());
                for (own, _) in
                    (rank..ROWS).step_by(ranks).enumerate().filter(|(_, row)| [4, 6].contains(row))
                {
                    targets.slice_set(&ignored, 0, own)?;
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
    let expected = train("", Recompute::None);
    let check = |layout: &str, recompute: Recompute| {
        for (a, b) in train(layout, recompute).iter().zip(&expected) {
            assert!((a - b).abs() < 1e-10, "{layout}, {recompute:?}: {a}, expected {b}");
        }
    };
    for layout in ["dp=2", "shard=2", "shard=2,tp=2", "pp=2,dp=2", "pp=2,shard=2", "cp=2", "dp=2,cp=2"] {
        check(layout, Recompute::None);
    }
    for recompute in [Recompute::Units, Recompute::Every(3), Recompute::Selective] {
        check("shard=2", recompute);
    }
}
