//! Benchmarks of checkpoints: writing to disk (synced), and reading.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use criterion::{BenchmarkId, Throughput};
use training::{Checkpoint, CheckpointConfig, Checkpoints};

use crate::group::Group;

/// Bytes of each tensor.
const BYTES: usize = 1 << 20;

pub(crate) fn bench(group: &mut Group<'_>) {
    for tensors in [1, 64] {
        let bytes = tensors * BYTES;
        group.throughput(Throughput::Bytes(bytes as u64));
        let folder = tempfile::tempdir().expect("a folder");
        let config = CheckpointConfig { dir: folder.path().into(), ..CheckpointConfig::default() };
        let checkpoints = Checkpoints::open(config).expect("it is empty");
        let mut checkpoint = contents(tensors);
        group.bench_function(BenchmarkId::new("write", bytes), |bencher| {
            bencher.iter(|| {
                checkpoint.step += 1;
                checkpoints.save(&checkpoint).expect("it can be written")
            });
        });
        // Written once more, as a filter may have excluded the write benchmark.
        checkpoint.step += 1;
        checkpoints.save(&checkpoint).expect("it can be written");
        group.bench_function(BenchmarkId::new("read", bytes), |bencher| {
            bencher.iter(|| {
                checkpoints.load_latest(&Device::Cpu).expect("it can be read").expect("there is one")
            });
        });
    }
}

fn contents(tensors: usize) -> Checkpoint {
    let tensor = |index: usize| {
        let values = Tensor::ones(BYTES / size_of::<f32>(), DType::F32, &Device::Cpu).expect("it fits");
        (format!("layers.{index}.weight"), values)
    };
    let model: HashMap<String, Tensor> = (0..tensors).map(tensor).collect();
    Checkpoint { tensors: [("model".to_string(), model)].into(), ..Checkpoint::default() }
}
