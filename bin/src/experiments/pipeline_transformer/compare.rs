//! How busy ranks are: one micro-batch at a time, and many.

use std::sync::Arc;
use std::time::Instant;

use candle_core::Tensor;
use comm::{Communicator, Operation, all_gather_object};
use pipeline::{Durations, PipelineConfig, Schedule, ScheduleKind};
use serde::{Deserialize, Serialize};

use crate::console::say;
use crate::error::Result;

use super::Made;

/// Steps that are not counted, and steps that are.
const STEPS: (usize, usize) = (5, 30);

/// What was measured of one way to work.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Use {
    schedule: ScheduleKind,
    micro_batches: usize,
    /// Mean seconds of a step.
    step_s: f64,
    /// Seconds that each rank computes in a step.
    busy_s: Vec<f64>,
    /// The part of the time that ranks are idle: planned with equal times for all stages, backward taking twice as long as forward.
    planned: f64,
}

impl Use {
    fn name(&self) -> String {
        let what = if self.micro_batches == 1 { "micro-batch" } else { "micro-batches" };
        format!("{}, {} {what}", self.schedule, self.micro_batches)
    }

    fn idle(&self) -> f64 {
        1.0 - self.busy_s.iter().sum::<f64>() / (self.step_s * self.busy_s.len() as f64)
    }

    fn line(&self) -> String {
        let busy = |(rank, busy): (usize, &f64)| format!("rank {rank} {:.1} %", 100.0 * busy / self.step_s);
        let busy: Vec<String> = self.busy_s.iter().enumerate().map(busy).collect();
        format!(
            "{}: {:.3} ms a step; busy: {}; idle {:.1} %, by the formula {:.1} %",
            self.name(),
            1e3 * self.step_s,
            busy.join(", "),
            100.0 * self.idle(),
            100.0 * self.planned
        )
    }
}

/// Measures the schedule of `config`, and one micro-batch at a time. Nothing is learnt meanwhile. Every rank must call it.
pub(super) fn measure(
    comm: &Arc<dyn Communicator>,
    config: &PipelineConfig,
    batch: &(Tensor, Tensor),
    made: &dyn Fn(&PipelineConfig) -> Result<Made>,
) -> Result<Vec<Use>> {
    let naive = PipelineConfig {
        schedule: ScheduleKind::Naive,
        stages_per_rank: None,
        micro_batches: 1,
        ..config.clone()
    };
    let naive = match config.stages_per_rank() {
        1 => naive,
        // Other stages than one a rank need other cuts.
        _ => PipelineConfig { split: Default::default(), ..naive },
    };
    [naive, config.clone()].iter().map(|config| one(comm, config, batch, made(config)?)).collect()
}

fn one(
    comm: &Arc<dyn Communicator>,
    config: &PipelineConfig,
    (input, target): &(Tensor, Tensor),
    mut made: Made,
) -> Result<Use> {
    let (mut began, mut busy) = (Instant::now(), 0.0);
    for step in 0..STEPS.0 + STEPS.1 {
        if step == STEPS.0 {
            comm.run(Operation::Barrier)?;
            (began, busy) = (Instant::now(), 0.0);
        }
        let spans = made.pipeline.step(Some(input), Some(target))?.spans;
        busy += spans.iter().map(|span| span.end - span.start).sum::<f64>();
    }
    comm.run(Operation::Barrier)?;
    let step_s = began.elapsed().as_secs_f64() / STEPS.1 as f64;
    let busy_s = all_gather_object(&**comm, &(busy / STEPS.1 as f64))?;
    let (schedule, micro_batches) = (config.schedule, config.micro_batches);
    let planned = Schedule::of(schedule, comm.world_size(), config.stages_per_rank(), micro_batches)?;
    let plan = planned.plan(&Durations::default());
    let idle = 1.0 - plan.busy().iter().sum::<f64>() / (plan.makespan() * comm.world_size() as f64);
    Ok(Use { schedule, micro_batches, step_s, busy_s, planned: idle })
}

pub(super) fn print(uses: &[Use]) -> Result<()> {
    say(format_args!("\n===== use of the ranks ====="))?;
    uses.iter().try_for_each(|one| say(format_args!("{}", one.line())))?;
    match uses {
        [naive, many] => say(format_args!("speed-up: {:.2}x", naive.step_s / many.step_s)),
        _ => Ok(()),
    }
}
