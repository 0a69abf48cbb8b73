//! Memory that a forward pass keeps for backward, including what operations keep internally: as counted by the
//! allocator, and as planned by `plan`.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use bin::documents::handbook::ddp_mlp::model::{FEATURES, Mlp};
use bin::documents::shared::transformer::{Transformer, TransformerConfig};
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use comm::{Local, Mesh};
use ops::{AttentionMask, activation_bytes, cross_entropy, linear, mse};
use plan::{MlpLoss, Model, Setting, Strategy, TransformerSizes};
use sampler::{Generator, SharedGenerator};
use tensor_parallel::{LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};

/// The system's allocator, counting the bytes in use.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        USED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the bytes allocated and kept by a forward pass, and those that `activation_bytes` reports for its graph.
fn kept(forward: impl Fn() -> Tensor) -> [f64; 2] {
    let measured = || {
        let before = USED.load(Ordering::Relaxed);
        let loss = forward();
        let after = USED.load(Ordering::Relaxed);
        [(after - before) as f64, activation_bytes(&loss, []) as f64]
    };
    // A thread's first matrix product allocates a buffer that is kept, and which threads take part varies; hence the
    // minimum.
    (0..8).map(|_| measured()).min_by(|a, b| a[0].total_cmp(&b[0])).unwrap()
}

/// Checks that the plan equals the graph's report to the byte, and the allocator's count except for the graph's own
/// nodes.
fn check(model: &Model, batch_size: usize, [allocated, told]: [f64; 2]) {
    let setting = Setting { ranks: 1, batch_size, micro_batches: 1, element: 4, gathered: 4, optimizer: 0 };
    let alone = Strategy::Tensor { tp: 1, sequence_parallel: false };
    let planned = alone.estimate(model, &setting).memory.activations;
    let what = format!("{}, {batch_size} samples: {planned} planned, {allocated} allocated", model.name);
    assert_eq!(planned, told, "{what}");
    assert!(planned <= allocated && allocated <= 1.06 * planned, "{what}");
}

/// A single test, as the count covers the whole process.
#[test]
fn forward_keeps_what_is_planned() {
    for sizes in [(8, 64, 32, 8, 64, 96), (4, 24, 128, 2, 512, 1000), (16, 40, 16, 4, 48, 300)] {
        for dropout in [0.0, 0.1] {
            transformers(sizes, dropout);
        }
    }
    layers();
}

fn transformers(
    (batch, length, d_model, num_heads, d_ff, vocab_size): (usize, usize, usize, usize, usize, usize),
    dropout: f64,
) {
    let [d, heads, ff, vocabulary, len] =
        [d_model, num_heads, d_ff, vocab_size, length].map(|size| size as u64);
    let shape = |is_modern| TransformerSizes {
        vocab_size: vocabulary,
        d_model: d,
        num_heads: heads,
        d_ff: ff,
        num_layers: 3,
        max_len: len,
        length: len,
        is_modern,
        has_dropout: dropout > 0.0,
    };
    let tokens = Tensor::zeros((batch, length), DType::U32, &Device::Cpu).unwrap();

    let (num_layers, max_len) = (3, length);
    let mask = AttentionMask::Full;
    let config =
        TransformerConfig { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, mask };
    let map = VarMap::new();
    let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let random = SharedGenerator::from(Generator::new(1));
    let model = Transformer::new(builder, &config, &random).unwrap();
    let loss = || cross_entropy(&model.forward_t(&tokens, true).unwrap(), &tokens, None).unwrap();
    check(&Model::transformer("the tutorial's transformer", &shape(false)), batch, kept(loss));

    let config =
        LanguageModelConfig { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, mask };
    let found = Local::run_shared(1, |comm| {
        let mesh = Mesh::new(comm, &[("tp", 1)])?;
        let model = |builder| LanguageModel::new(builder, &config);
        let parallel =
            TensorParallel::new(&mesh, &TensorParallelConfig::default(), &Weights::seed(1), model)?;
        Ok(kept(|| parallel.model().unwrap().loss(&tokens, &tokens).unwrap()))
    });
    check(&Model::transformer("the language model", &shape(true)), batch, found.unwrap()[0]);
}

/// The models of `ddp-trainer` and `ddp-mlp`.
fn layers() {
    let (map, batch) = (VarMap::new(), 4096);
    let builder = || VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let zeros = |width: usize| Tensor::zeros((batch, width), DType::F32, &Device::Cpu).unwrap();
    let (x, y) = (zeros(20), zeros(1));
    let layer = linear(20, 1, builder()).unwrap();
    let model = Model::mlp("ddp-trainer", &[20, 1], false, MlpLoss::Squares);
    check(&model, batch, kept(|| mse(&layer.forward(&x).unwrap(), &y).unwrap()));
    let (x, y) = (zeros(FEATURES), Tensor::zeros(batch, DType::U32, &Device::Cpu).unwrap());
    let mlp = Mlp::new(builder()).unwrap();
    let model = Model::mlp("ddp-mlp", &[10, 20, 2], true, MlpLoss::Classes);
    check(&model, batch, kept(|| cross_entropy(&mlp.forward(&x).unwrap(), &y, None).unwrap()));
}
