//! Threads and open files of a rank do not grow with the number of copies of the model.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::read_dir;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{InitMethod, Mesh, Secret, Tcp, TcpConfig, Transport};
use pipeline::{ParameterGroups, Pipeline, PipelineConfig};

use crate::common::{Comm, ROWS, WIDTH, batch, loss, modules, weights};

/// The most threads of a rank, its own included.
const MOST_THREADS: f64 = 12.0;
const MICRO_BATCHES: usize = 2;

/// Returns the number of open files, and of threads, except those that this test has started itself.
fn in_use() -> [usize; 2] {
    let tasks = read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    let threads = names.filter(|name| name.starts_with("comm") || name.starts_with("girandole"));
    [read_dir("/proc/self/fd").unwrap().count(), threads.count()]
}

/// Trains for a step and an evaluation, and keeps the groups until all ranks were counted.
fn train(comm: Comm, dp: usize, counted: &Barrier) {
    let mesh = Mesh::new(comm, &[("pp", 2), ("dp", dp)]).unwrap();
    let copies = mesh.axis("dp").unwrap().clone();
    let config = PipelineConfig {
        micro_batches: MICRO_BATCHES,
        averaged_over: Some(ParameterGroups::of(copies)),
        ..PipelineConfig::default()
    };
    let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).unwrap();
    let stages = mesh.axis("pp").unwrap().clone();
    let mut pipeline = Pipeline::new(stages, &modules(2), &weights(), &example, loss, &config).unwrap();
    let (x, y) = batch(0, ROWS * MICRO_BATCHES).unwrap();
    pipeline.step(Some(&x), Some(&y)).unwrap();
    pipeline.evaluate(Some(&x), Some(&y)).unwrap();
    counted.wait();
    counted.wait();
}

/// Returns the files and threads of a rank, on average, in a pipeline of two stages with `dp` copies.
fn of_a_rank(dp: usize) -> [f64; 2] {
    let (folder, secret, ranks) = (tempfile::tempdir().unwrap(), Secret::random().unwrap(), 2 * dp);
    let counted = Barrier::new(ranks + 1);
    let before = in_use();
    let config = |rank| TcpConfig {
        rank,
        world_size: ranks,
        secret: Some(secret.clone()),
        init_method: InitMethod::File(folder.path().join("meeting")),
        transport: Transport::Tcp,
        ..TcpConfig::default()
    };
    std::thread::scope(|scope| {
        for rank in 0..ranks {
            let (config, counted) = (config(rank), &counted);
            scope.spawn(move || train(Arc::new(Tcp::connect(&config).unwrap()), dp, counted));
        }
        counted.wait();
        // A thread that makes a connection ends a moment after it has made it.
        let (began, mut now) = (Instant::now(), in_use());
        while began.elapsed() < Duration::from_secs(2) {
            now = [0, 1].map(|what| in_use()[what].min(now[what]));
            std::thread::sleep(Duration::from_millis(50));
        }
        counted.wait();
        [0, 1].map(|what| (now[what] - before[what]) as f64 / ranks as f64)
    })
}

#[test]
fn what_a_rank_uses_does_not_grow_with_the_copies() {
    let [few, many] = [2, 10].map(of_a_rank);
    assert!(few[1] + 1.0 <= MOST_THREADS && many[1] <= few[1] + 0.5, "threads: {few:?} and {many:?}");
    // Connections for collectives over more ranks come with the logarithm of their number.
    assert!(many[0] <= few[0] + 30.0, "files: {few:?} and {many:?}");
}
