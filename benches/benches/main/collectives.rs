//! Collectives over TCP, by size and ranks; each rank is a process.

use std::time::Duration;

use benches::{Job, measure};
use criterion::{BenchmarkId, Criterion, Throughput};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("collectives");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    for ranks in [2, 4] {
        for bytes in [4 << 10, 1 << 20, 64 << 20] {
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(
                BenchmarkId::new(format!("all_reduce/tcp/{ranks} ranks"), bytes),
                |bencher| {
                    bencher.iter_custom(|rounds| {
                        measure(Job::AllReduce { bytes }, ranks, rounds).expect("ranks run")
                    });
                },
            );
        }
        group.bench_function(format!("barrier/tcp/{ranks} ranks"), |bencher| {
            bencher.iter_custom(|rounds| measure(Job::Barrier, ranks, rounds).expect("ranks run"));
        });
    }
    group.finish();
}
