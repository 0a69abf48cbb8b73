//! Memory of activations: with 1F1B it does not grow with the number of micro-batches, with GPipe it does.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_nn::func;
use comm::Local;
use pipeline::{Modules, Pipeline, PipelineConfig, ScheduleKind};
use sampler::{Generator, SharedGenerator};
use training::TorchInit;

/// The system allocator, with counts of the bytes in use and of their maximum.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(used, Ordering::Relaxed);
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

const WIDTH: usize = 16;
const ROWS: usize = 256;

/// Returns the peak of bytes in use during a step, of both ranks together, beyond those in use before it.
fn peak(schedule: ScheduleKind, micro_batches: usize) -> usize {
    let layer = |vb| ops::linear(WIDTH, WIDTH, vb);
    let modules = || {
        (0..8).fold(Modules::new(), |modules, number| {
            modules
                .module(&format!("fc{number}"), layer)
                .module(&format!("tanh{number}"), |_| Ok(func(Tensor::tanh)))
        })
    };
    let peaks = Local::run_shared(2, |comm| {
        let generator = SharedGenerator::from(Generator::new(1));
        let builder = |map: &_| TorchInit::var_builder(&generator, map, DType::F32, &Device::Cpu);
        let example = Tensor::zeros((ROWS, WIDTH), DType::F32, &Device::Cpu)?;
        let loss = |output: &Tensor, _: &Tensor| output.sqr()?.mean_all();
        let config = PipelineConfig { schedule, micro_batches, ..PipelineConfig::default() };
        let mut pipeline = Pipeline::new(comm.clone(), &modules(), &builder, &example, loss, &config)?;
        let batch = Tensor::ones((ROWS * micro_batches, WIDTH), DType::F32, &Device::Cpu)?;
        pipeline.step(Some(&batch), Some(&batch))?;
        comm.barrier()?.wait()?;
        let before = USED.load(Ordering::Relaxed);
        if comm.rank() == 0 {
            MOST.store(before, Ordering::Relaxed);
        }
        comm.barrier()?.wait()?;
        pipeline.step(Some(&batch), Some(&batch))?;
        comm.barrier()?.wait()?;
        Ok(MOST.load(Ordering::Relaxed) - before)
    });
    peaks.unwrap()[0]
}

#[test]
fn only_gpipe_needs_more_for_more_micro_batches() {
    // The peaks of the two ranks may or may not be at the same time.
    let [few, many] = [8, 64].map(|micro_batches| peak(ScheduleKind::OneFOneB, micro_batches));
    assert!(many < 2 * few, "1F1B: {few} bytes with 8 micro-batches, {many} with 64");
    let [few, many] = [8, 64].map(|micro_batches| peak(ScheduleKind::GPipe, micro_batches));
    assert!(many > 4 * few, "GPipe: {few} bytes with 8 micro-batches, {many} with 64");
}
