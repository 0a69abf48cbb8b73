//! Benchmark of launching: from starting ranks to the end of their first training step.

use benches::Ranks;
use benches::workload::{Steps, Strategy};
use criterion::BenchmarkId;

use crate::group::Group;
use crate::training::training;

pub(crate) fn bench(group: &mut Group<'_>) {
    for ranks in [1, 2, 4, 8] {
        let id = BenchmarkId::new("to the first step", format!("{ranks} ranks"));
        group.bench_function(id, |bencher| {
            let training = training(Strategy::ddp(), Steps::Count(1));
            let once = || Ranks::new(ranks).to_first_step(&training).expect("ranks run");
            bencher.iter_custom(|rounds| (0..rounds).map(|_| once()).sum());
        });
    }
}
