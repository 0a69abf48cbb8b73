//! A criterion benchmark group that records whether any of its benchmarks ran.

use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{Bencher, BenchmarkGroup, BenchmarkId, Criterion, Throughput};

pub(crate) struct Group<'a> {
    benches: BenchmarkGroup<'a, WallTime>,
    ran: bool,
}

impl<'a> Group<'a> {
    /// Creates a group whose benchmarks are measured for about this long each, not counting the time to start ranks.
    pub(crate) fn new(criterion: &'a mut Criterion, name: &str, milliseconds: u64) -> Group<'a> {
        let mut benches = criterion.benchmark_group(name);
        let time = Duration::from_millis(milliseconds);
        benches.sample_size(10).warm_up_time(time / 5).measurement_time(time);
        Group { benches, ran: false }
    }

    pub(crate) fn throughput(&mut self, throughput: Throughput) {
        self.benches.throughput(throughput);
    }

    pub(crate) fn bench_function(&mut self, id: BenchmarkId, mut bench: impl FnMut(&mut Bencher<'_>)) {
        self.benches.bench_function(id, |bencher| {
            self.ran = true;
            bench(bencher);
        });
    }

    /// Ends the group; returns whether a benchmark in it ran.
    pub(crate) fn finish(self) -> bool {
        self.benches.finish();
        self.ran
    }
}
