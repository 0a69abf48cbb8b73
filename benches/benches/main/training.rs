//! Benchmarks of a training step, by strategy; each rank is a process with one thread.

use std::time::Duration;

use benches::Ranks;
use benches::workload::{Sizes, Steps, Strategy, Training};
use criterion::BenchmarkId;
use pipeline::ScheduleKind;

use crate::group::Group;

/// Rows of tokens per step.
const BATCH_SIZE: usize = 16;

pub(crate) fn data_parallel(group: &mut Group<'_>) {
    let whole = usize::MAX / 2;
    for (name, bucket_bytes) in
        [("buckets of 64 KiB", 64 << 10), ("buckets of 25 MiB", 25 << 20), ("one bucket, no overlap", whole)]
    {
        step(group, name, 2, Strategy::Ddp { bucket_bytes });
    }
    for world_size in [1, 4] {
        step(group, "buckets of 25 MiB", world_size, Strategy::ddp());
    }
}

pub(crate) fn sharded(group: &mut Group<'_>) {
    [1, 2, 4].into_iter().for_each(|ranks| step(group, "full shard", ranks, Strategy::Fsdp));
}

pub(crate) fn tensor_parallel(group: &mut Group<'_>) {
    [1, 2, 4].into_iter().for_each(|ranks| step(group, "step", ranks, Strategy::TensorParallel));
}

pub(crate) fn pipeline(group: &mut Group<'_>) {
    for schedule in ScheduleKind::ALL {
        step(group, schedule.name(), 2, Strategy::Pipeline { schedule, micro_batches: 4 });
    }
}

fn step(group: &mut Group<'_>, name: &str, world_size: usize, strategy: Strategy) {
    let ranks = if world_size == 1 { "1 rank".to_string() } else { format!("{world_size} ranks") };
    group.bench_function(BenchmarkId::new(name, ranks), |bencher| {
        bencher.iter_custom(|rounds| {
            let training = training(strategy, Steps::Count(rounds as usize));
            let figures = Ranks::new(world_size).train(&training).expect("ranks run");
            Duration::from_secs_f64(figures.step_s * rounds as f64)
        });
    });
}

pub(crate) fn training(strategy: Strategy, steps: Steps) -> Training {
    Training { strategy, sizes: Sizes::SMALL, batch_size: BATCH_SIZE, warm_up: 2, steps }
}
