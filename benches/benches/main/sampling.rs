//! Benchmarks of random numbers and sampler orders, by size of the data set.

use std::hint::black_box;

use criterion::{BenchmarkId, Throughput};
use sampler::{DistributedSampler, DistributedSamplerConfig, Generator, Sampler};

use crate::group::Group;

pub(crate) fn bench(group: &mut Group<'_>) {
    for len in [1_000, 100_000, 10_000_000] {
        group.throughput(Throughput::Elements(len as u64));
        group.bench_function(BenchmarkId::new("randn", len), |bencher| {
            bencher.iter(|| Generator::new(42).randn(black_box(len)).expect("it fits"));
        });
        group.bench_function(BenchmarkId::new("rand", len), |bencher| {
            bencher.iter(|| Generator::new(42).rand(black_box(len)).expect("it fits"));
        });
        group.bench_function(BenchmarkId::new("randperm", len), |bencher| {
            bencher.iter(|| Generator::new(42).randperm(black_box(len)).expect("it fits"));
        });
        group.bench_function(BenchmarkId::new("an epoch of one of 4 ranks", len), |bencher| {
            let config = DistributedSamplerConfig { dataset_len: len, num_replicas: 4, ..Default::default() };
            let mut sampler = DistributedSampler::new(config).expect("it is valid");
            bencher.iter(|| sampler.indices().expect("it fits").sum::<usize>());
        });
    }
}
