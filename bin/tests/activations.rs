//! All that forward keeps for backward, what operations keep to themselves as well: counted by the allocator, and as `plan` has it.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_nn::{ModuleT, VarBuilder, VarMap};
use comm::{Local, Mesh};
use girandole::models::transformer::{Transformer, TransformerConfig};
use girandole::plan::model::{Model, TransformerSizes};
use girandole::plan::strategy::{Setting, Strategy};
use sampler::{Generator, SharedGenerator};
use tensor_parallel::{LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};
use training::cross_entropy;

/// The system's allocator, with a count of what is in use.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator as it came.
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

/// Bytes that are in use because of what this gives.
fn kept<T>(forward: impl Fn() -> T) -> f64 {
    // What is made once and stays is made here.
    drop(forward());
    let before = USED.load(Ordering::Relaxed);
    let result = forward();
    let after = USED.load(Ordering::Relaxed);
    drop(result);
    (after - before) as f64
}

fn planned(model: &Model, batch_size: usize) -> f64 {
    let setting = Setting { ranks: 1, batch_size, micro_batches: 1, element: 4, gathered: 4, optimizer: 0 };
    let alone = Strategy::Tensor { tp: 1, sequence_parallel: false };
    alone.estimate(model, &setting).memory.activations
}

/// One test, as the count is of the whole process.
#[test]
fn forward_keeps_what_is_planned() {
    for (batch, length, d_model, num_heads, d_ff, vocab_size) in
        [(8, 64, 32, 8, 64, 96), (4, 24, 128, 2, 512, 1000), (16, 40, 16, 4, 48, 300)]
    {
        let shape = |is_modern| TransformerSizes {
            vocab_size: vocab_size as u64,
            d_model: d_model as u64,
            num_heads: num_heads as u64,
            d_ff: d_ff as u64,
            num_layers: 3,
            max_len: length as u64,
            length: length as u64,
            is_modern,
        };
        let tokens = Tensor::zeros((batch, length), DType::U32, &Device::Cpu).unwrap();
        let check = |what: &str, found: f64, is_modern: bool| {
            let planned = planned(&Model::transformer(what, &shape(is_modern)), batch);
            assert!(
                (planned - found).abs() <= 0.1 * found,
                "{what}, {batch} rows: {planned} planned, {found} found"
            );
        };

        let config = TransformerConfig {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers: 3,
            max_len: length,
            dropout: 0.0,
            ..TransformerConfig::default()
        };
        let builder = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let random = SharedGenerator::from(Generator::new(1));
        let model = Transformer::new(builder, &config, &random).unwrap();
        let loss = || cross_entropy(&model.forward_t(&tokens, true).unwrap(), &tokens, None).unwrap();
        check("the document's transformer", kept(loss), false);

        let config = LanguageModelConfig {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers: 3,
            max_len: length,
            ..LanguageModelConfig::default()
        };
        let found = Local::run_shared(1, |comm| {
            let mesh = Mesh::new(comm, &[("tp", 1)])?;
            let model = |builder| LanguageModel::new(builder, &config);
            let parallel =
                TensorParallel::new(&mesh, &TensorParallelConfig::default(), &Weights::seed(1), model)?;
            Ok(kept(|| parallel.model().loss(&tokens, &tokens).unwrap()))
        });
        check("the language model", found.unwrap()[0], true);
    }
}
