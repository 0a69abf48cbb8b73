//! Threads and descriptors of a rank: they do not grow with the number of data-parallel replicas.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::{Arc, Barrier};

use candle_core::{DType, Device, Tensor};
use comm::{InitMethod, Mesh, Secret, Tcp, TcpConfig};
use pipeline::{Pipeline, PipelineConfig};

use crate::common::{ROWS, WIDTH, batch, loss, modules, weights};

fn count(folder: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{folder}")).unwrap().count()
}

/// Returns the threads and open descriptors of a rank, on average, after a step with 2 stages and `dp` replicas of each.
fn of_a_rank(dp: usize) -> (usize, usize) {
    let (ranks, folder, secret) = (2 * dp, tempfile::tempdir().unwrap(), Secret::random().unwrap());
    let (before, barrier) = ((count("task"), count("fd")), Barrier::new(ranks + 1));
    let rank = |rank: usize| {
        let config = TcpConfig {
            rank,
            world_size: ranks,
            secret: Some(secret.clone()),
            init_method: InitMethod::File(folder.path().join("meeting")),
            ..TcpConfig::default()
        };
        let mesh = Mesh::new(Arc::new(Tcp::connect(&config).unwrap()), &[("pp", 2), ("dp", dp)]).unwrap();
        let axis = |name: &str| mesh.axis(name).unwrap().clone();
        let example = Tensor::zeros((ROWS, WIDTH), DType::F64, &Device::Cpu).unwrap();
        let config = PipelineConfig { micro_batches: 2, dp: Some(axis("dp")), ..PipelineConfig::default() };
        let mut pipeline =
            Pipeline::new(axis("pp"), &modules(2), &weights(), &example, loss, &config).unwrap();
        let (x, y) = batch(0, 2 * ROWS).unwrap();
        pipeline.step(Some(&x), Some(&y)).unwrap();
        barrier.wait();
        barrier.wait();
    };
    std::thread::scope(|scope| {
        (0..ranks).for_each(|number| {
            drop(scope.spawn({
                let rank = &rank;
                move || rank(number)
            }))
        });
        barrier.wait();
        let now = (count("task"), count("fd"));
        barrier.wait();
        // Without the thread that plays the rank.
        ((now.0 - before.0) / ranks - 1, (now.1 - before.1) / ranks)
    })
}

#[test]
fn they_do_not_grow_with_replicas() {
    let (two, eight) = (of_a_rank(2), of_a_rank(8));
    assert!(eight.0 <= 20 && eight.0 <= two.0 + 1, "threads of a rank: {} and {}", two.0, eight.0);
    assert!(eight.1 < 2 * two.1, "descriptors of a rank: {} and {}", two.1, eight.1);
}
