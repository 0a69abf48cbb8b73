//! Collectives by transport, size and ranks; each rank is a process.

use std::time::Duration;

use benches::{Job, measure};
use comm::Transport;
use criterion::{BenchmarkId, Criterion, Throughput};

pub(crate) fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("collectives");
    group.sample_size(10).warm_up_time(Duration::from_millis(500)).measurement_time(Duration::from_secs(3));
    for (ranks, transport) in [2, 4]
        .into_iter()
        .flat_map(|ranks| [Transport::Shm, Transport::Tcp].map(|transport| (ranks, transport)))
    {
        let measure = move |job, rounds| measure(job, transport, ranks, rounds).expect("ranks run");
        for bytes in [4 << 10, 1 << 20, 64 << 20] {
            group.throughput(Throughput::Bytes(bytes as u64));
            let id = BenchmarkId::new(format!("all_reduce/{transport}/{ranks} ranks"), bytes);
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|rounds| measure(Job::AllReduce { bytes }, rounds));
            });
        }
        group.bench_function(format!("barrier/{transport}/{ranks} ranks"), |bencher| {
            bencher.iter_custom(|rounds| measure(Job::Barrier, rounds));
        });
    }
    group.finish();
}
