//! Orders and random numbers, against the size of the data set.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use sampler::{DistributedSampler, DistributedSamplerConfig, Generator, Sampler};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sampling");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(2));
    for len in [10_000, 1_000_000] {
        group.throughput(Throughput::Elements(len as u64));
        group.bench_function(BenchmarkId::new("randn", len), |bencher| {
            bencher.iter(|| Generator::new(42).randn(black_box(len)).expect("it fits"));
        });
        group.bench_function(BenchmarkId::new("an epoch of one of 4 ranks", len), |bencher| {
            let config = DistributedSamplerConfig { dataset_len: len, num_replicas: 4, ..Default::default() };
            let mut sampler = DistributedSampler::new(config).expect("it is valid");
            bencher.iter(|| sampler.indices().expect("it fits").sum::<usize>());
        });
    }
    group.finish();
}
