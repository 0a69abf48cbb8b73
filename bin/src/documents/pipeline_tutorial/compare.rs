//! The use of ranks with one micro-batch at a time, and with many.

use cli::prelude::*;
use comm::Communicator;
use pipeline::{PipelineConfig, ScheduleKind};

use super::utilization::Utilization;

use super::{Batch, BuiltPipeline};

/// Measures the schedule of `config`, and one micro-batch at a time. Parameters are not updated. Every rank of `world` must
/// call it, with the group of its stages.
pub(super) fn measure(
    world: &dyn Communicator,
    stages: &dyn Communicator,
    config: &PipelineConfig,
    batch: &Batch,
    made: &dyn Fn(&PipelineConfig) -> Result<BuiltPipeline>,
) -> Result<Vec<Utilization>> {
    let naive = PipelineConfig {
        schedule: ScheduleKind::Naive,
        stages_per_rank: None,
        micro_batches: 1,
        ..config.clone()
    };
    let naive = match config.stages_per_rank() {
        1 => naive,
        // With another number of stages than one per rank, the cuts of `config` do not fit.
        _ => PipelineConfig { split: Default::default(), ..naive },
    };
    let used = |config| Ok(Utilization::measure(&mut made(config)?.pipeline, config, world, stages, batch)?);
    [&naive, config].into_iter().map(used).collect()
}

pub(super) fn print(uses: &[Utilization]) -> Result<()> {
    say(format_args!("\n===== use of the ranks ====="))?;
    uses.iter().try_for_each(|one| say(format_args!("{one}")))?;
    match uses {
        [naive, many] => say(format_args!("speed-up: {:.2}x", naive.step_s / many.step_s)),
        _ => Ok(()),
    }
}
