//! Compares planned memory with the most that each rank holds during a step, as counted by the allocator; ranks are
//! threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::DType;
use candle_nn::Optimizer;
use comm::{Communicator, Local};
use girandole::{IsTrained, Layout};
use models::{LabelsConfig, Lora, LoraConfig, ModelConfig, Problem};
use ops::quantized::Format;
use pipeline::ScheduleKind;
use plan::language::{Subject, Training};
use training::build::Recompute;
use training::{Adam, AdamConfig};

/// The system's allocator, counting the bytes that each thread has in use, and their maximum.
struct Counting;

thread_local! {
    static USED: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// Bytes in use on all threads, and their maximum.
static ALL_USED: AtomicIsize = AtomicIsize::new(0);
static ALL_MOST: AtomicIsize = AtomicIsize::new(0);

/// Held by each test, so that no other one allocates at the same time.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn count(bytes: isize) {
    let used = ALL_USED.fetch_add(bytes, Ordering::Relaxed) + bytes;
    ALL_MOST.fetch_max(used, Ordering::Relaxed);
    // A thread that is ending no longer counts.
    let _ = USED.try_with(|used| {
        used.set(used.get() + bytes);
        MOST.with(|most| most.set(most.get().max(used.get())));
    });
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Block) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Block) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Block) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the most bytes that each rank has in use in its second step.
fn held((model, lora): (&ModelConfig, Option<&Lora>), layout: &Layout, training: &Training) -> Vec<f64> {
    let run = |comm| {
        let is_trained = lora.map(Lora::trained);
        let (mut parallel, tokens) = common::parallel(comm, (model, lora), layout, training, is_trained)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::adamw()).unwrap();
        // Of a head for labels, one in each row.
        let of_row = vec![(training.length as u32 - 1, vec![1.0])];
        let targets = match &model.labels {
            Some(labels) => {
                labels.targets(&vec![of_row; tokens.dim(0)?], training.length, tokens.device())?
            }
            None => tokens.clone(),
        };
        for _ in 0..2 {
            MOST.set(USED.get());
            let step = parallel.step(&tokens, &targets).unwrap();
            adam.step(&step.grads)?;
        }
        Ok(MOST.get() as f64)
    };
    Local::run_shared(layout.ranks(), run).unwrap()
}

/// A model with a large vocabulary for its size: what the loss needs is many times the buffers that are not planned, whose
/// size depends on the processor.
fn model() -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 32768, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false,
        "rope_theta": 10000.0}"#;
    ModelConfig::from_json(text).unwrap()
}

/// Where the loss needs most of the memory of a pipeline's last stage.
#[test]
fn the_most_that_a_last_stage_holds_is_planned() {
    let _alone = alone();
    let (none, all) = (Recompute::None, Recompute::Units);
    for (mesh, schedule, micro_batches, recompute) in [
        ("dp=1", ScheduleKind::OneFOneB, 2, none),
        ("pp=2", ScheduleKind::OneFOneB, 1, none),
        ("pp=2", ScheduleKind::OneFOneB, 2, all),
        ("pp=2", ScheduleKind::GPipe, 4, none),
        ("pp=4", ScheduleKind::OneFOneB, 4, none),
        ("pp=2,dp=2", ScheduleKind::OneFOneB, 2, none),
        ("pp=2,tp=2", ScheduleKind::OneFOneB, 2, none),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let layout: Layout = mesh.parse().unwrap();
            let training = Training {
                batch_size: 8,
                length: 64,
                micro_batches: Some(micro_batches),
                recompute,
                schedule,
                dtype,
                ..Training::default()
            };
            compare(&model(), &layout, &training);
        }
    }
}

/// A head for labels needs as little as they are, whatever the vocabulary.
#[test]
fn the_most_that_a_head_for_labels_holds_is_planned() {
    let _alone = alone();
    let names = ["no", "yes", "maybe"].map(String::from).to_vec();
    let labels = LabelsConfig { names, problem: Problem::SingleLabel, pad_token: None };
    let model = model().with_labels(labels).unwrap();
    for mesh in ["dp=1", "pp=2", "tp=2", "pp=2,tp=2"] {
        for dtype in [DType::F32, DType::BF16] {
            let training = Training { batch_size: 8, length: 64, dtype, ..Training::default() };
            compare(&model, &mesh.parse().unwrap(), &training);
        }
    }
    // Ranks of shards hold what another thread frees, and the other way round.
    let training = Training { batch_size: 8, length: 64, ..Training::default() };
    let layout: Layout = "shard=2".parse().unwrap();
    let planned = Subject::new(model.clone(), None).estimate(&training, &layout).unwrap().most().total();
    let before = ALL_USED.load(Ordering::Relaxed);
    ALL_MOST.store(before, Ordering::Relaxed);
    held((&model, None), &layout, &training);
    let held = (ALL_MOST.load(Ordering::Relaxed) - before) as f64 / 2.0;
    assert!((planned - held).abs() <= 0.1 * held + 2e6, "{planned} planned, {held} held");
}

/// A model whose blocks need more than its parameters and its loss.
fn model_of_long_rows() -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 192,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu",
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false,
        "rope_theta": 10000.0}"#;
    ModelConfig::from_json(text).unwrap()
}

/// The forward pass of a reference before training, where it needs more than the training of a small model. Nothing of a reference is
/// trained, so that no rank has a second copy of its parameters, or keeps what blocks compute.
#[test]
fn the_most_that_the_pass_of_a_reference_holds_is_planned() {
    let _alone = alone();
    let small = r#"{"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
        "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
    let small = ModelConfig::from_json(small).unwrap();
    for mesh in ["dp=1", "dp=2", "tp=2", "shard=2", "pp=2", "pp=2,dp=2", "pp=2,shard=2"] {
        for (model, length) in [(model(), 64), (model_of_long_rows(), 1024)] {
            for dtype in [DType::F32, DType::BF16] {
                let layout: Layout = mesh.parse().unwrap();
                let training = Training { batch_size: 8, length, dtype, ..Training::default() };
                let subject = Subject::new(small.clone(), None);
                let cost = subject.with_reference(Subject::new(model.clone(), None));
                let cost = cost.estimate(&training, &layout).unwrap();
                let run = |comm| {
                    let is_trained: IsTrained = Arc::new(|_: &str| false);
                    let (mut parallel, tokens) =
                        common::parallel(comm, (&model, None), &layout, &training, Some(is_trained))?;
                    MOST.set(USED.get());
                    parallel.evaluate(&tokens, &tokens).unwrap();
                    Ok(MOST.get() as f64)
                };
                let held: Vec<f64> = Local::run_shared(layout.ranks(), run).unwrap();
                let ranks = held.chunks(layout.ranks() / layout.pp);
                for (stage, held) in cost.stages.iter().zip(ranks) {
                    let (planned, held) = (stage.memory.total(), held.iter().copied().fold(0.0, f64::max));
                    assert!(stage.memory.optimizer == 0.0, "{mesh}");
                    let most_off = 0.15 * held + 2e6;
                    assert!(
                        (planned - held).abs() <= most_off,
                        "{mesh} {length} {dtype:?}: {planned} planned, {held} held"
                    );
                }
            }
        }
    }
}

/// Norms of rows are computed without another copy of a weight: magnitudes need no more beside adapters than is planned.
#[test]
fn the_most_that_magnitudes_of_adapters_hold_is_planned() {
    let _alone = alone();
    let text = r#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "hidden_act": "silu",
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false,
        "rope_theta": 10000.0}"#;
    let (model, layout) = (ModelConfig::from_json(text).unwrap(), Layout::default());
    for dtype in [DType::F32, DType::BF16] {
        let training = Training { batch_size: 2, length: 16, dtype, ..Training::default() };
        let of = |dora| {
            let lora = Lora::new(&LoraConfig { rank: 4, dora, ..LoraConfig::default() }, &model).unwrap();
            let held = held((&model, Some(&lora)), &layout, &training)[0];
            let cost = Subject::new(model.clone(), Some(lora)).estimate(&training, &layout).unwrap();
            [cost.most().total(), held]
        };
        let (with, without) = (of(true), of(false));
        let [planned, held] = [with[0] - without[0], with[1] - without[1]];
        assert!((planned - held).abs() <= 2e6, "{dtype:?}: {planned} planned, {held} held");
    }
}

/// Adapters of experts keep nothing of their own, and experts in few bits are not widened as a whole.
#[test]
fn the_most_that_adapters_of_experts_hold_is_planned() {
    let _alone = alone();
    let text = r#"{"model_type": "qwen3_moe", "head_dim": 64, "vocab_size": 64, "hidden_size": 512, "intermediate_size": 1024,
        "moe_intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}"#;
    let model = ModelConfig::from_json(text).unwrap();
    let targets = ["all-linear", "experts.gate_up_proj", "experts.down_proj"].map(String::from).into();
    let wide = Lora::new(&LoraConfig { rank: 8, targets, ..LoraConfig::default() }, &model).unwrap();
    let training = Training { batch_size: 4, length: 256, ..Training::default() };
    // Experts are computed by several threads.
    let held = |lora: &Lora, layout: &Layout| {
        let before = ALL_USED.load(Ordering::Relaxed);
        let run = |comm: Arc<dyn Communicator>| {
            let trained = Some(lora.trained());
            let (mut parallel, tokens) =
                common::parallel(comm.clone(), (&model, Some(lora)), layout, &training, trained)?;
            let mut adam = Adam::named(parallel.named_vars(), AdamConfig::adamw()).unwrap();
            for _ in 0..2 {
                comm.barrier()?.wait()?;
                ALL_MOST.store(ALL_USED.load(Ordering::Relaxed), Ordering::Relaxed);
                comm.barrier()?.wait()?;
                let step = parallel.step(&tokens, &tokens).unwrap();
                adam.step(&step.grads)?;
            }
            Ok(())
        };
        Local::run_shared(layout.ranks(), run).unwrap();
        (ALL_MOST.load(Ordering::Relaxed) - before) as f64 / layout.ranks() as f64
    };
    for lora in [wide.clone(), wide.quantized(Format::Nf4).unwrap(), wide.quantized(Format::Int8).unwrap()] {
        for mesh in ["", "ep=2"] {
            let layout: Layout = mesh.parse().unwrap();
            let held = held(&lora, &layout);
            let cost = Subject::new(model.clone(), Some(lora.clone())).estimate(&training, &layout).unwrap();
            let planned = cost.most().total();
            let most_off = 0.1 * held + 2e6;
            let bits = lora.base_format();
            assert!((planned - held).abs() <= most_off, "{mesh} {bits:?}: {planned} planned, {held} held");
        }
    }
}

/// Compares the plan with what the ranks of the last stage hold.
fn compare(model: &ModelConfig, layout: &Layout, training: &Training) {
    let cost = Subject::new(model.clone(), None).estimate(training, layout).unwrap();
    let held = held((model, None), layout, training);
    let ranks = held.chunks(layout.ranks() / layout.pp);
    for (stage, held) in cost.stages.iter().zip(ranks).skip(layout.pp - 1) {
        let (planned, held) = (stage.memory.total(), held.iter().copied().fold(0.0, f64::max));
        let Training { dtype, schedule, .. } = training;
        let what =
            format!("{layout} {dtype:?} {schedule} {:?}, stage {}", training.micro_batches, stage.stage);
        // A thread holds up to two megabytes that are not planned: buffers of products and messages.
        let most_off = 0.1 * held + 2e6;
        assert!((planned - held).abs() <= most_off, "{what}: {planned} planned, {held} held");
    }
}
