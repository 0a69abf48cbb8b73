//! Compares planned memory with the most that each rank holds during a step, as counted by the allocator; ranks are
//! threads.
#![allow(clippy::unwrap_used)]

mod common;

use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;

use candle_core::DType;
use candle_nn::Optimizer;
use comm::Local;
use girandole::Layout;
use models::ModelConfig;
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

fn count(bytes: isize) {
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
fn held(model: &ModelConfig, layout: &Layout, training: &Training) -> Vec<f64> {
    let run = |comm| {
        let (mut parallel, tokens) = common::parallel(comm, model, layout, training)?;
        let mut adam = Adam::named(parallel.named_vars(), AdamConfig::adamw()).unwrap();
        for _ in 0..2 {
            MOST.set(USED.get());
            let step = parallel.step(&tokens, &tokens).unwrap();
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
            let model = model();
            let cost = Subject::new(model.clone(), None).estimate(&training, &layout).unwrap();
            let held = held(&model, &layout, &training);
            let ranks = held.chunks(layout.ranks() / layout.pp);
            for (stage, held) in cost.stages.iter().zip(ranks).skip(layout.pp - 1) {
                let (planned, held) = (stage.memory.total(), held.iter().copied().fold(0.0, f64::max));
                let what = format!("{mesh} {dtype:?} {schedule} {micro_batches}, stage {}", stage.stage);
                // A thread holds up to two megabytes that are not planned: buffers of products and messages.
                let most_off = 0.1 * held + 2e6;
                assert!((planned - held).abs() <= most_off, "{what}: {planned} planned, {held} held");
            }
        }
    }
}
