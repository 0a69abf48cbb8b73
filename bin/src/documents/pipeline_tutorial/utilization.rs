//! Utilization of a pipeline's ranks, measured.

use std::fmt;
use std::time::Instant;

use candle_core::Tensor;
use comm::{Communicator, Operation, all_gather_object, broadcast_object};
use serde::{Deserialize, Serialize};

use pipeline::{ActionKind, Durations, Pipeline, PipelineConfig, Result, Schedule, ScheduleKind, Span};

/// Warm-up steps, not counted.
const FIRST: usize = 3;
/// Minimum and maximum number of counted steps, and the seconds they should take.
const COUNTED: (usize, usize, f64) = (3, 50, 2.0);

/// How much of the time the ranks of a pipeline compute, measured over some steps.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Utilization {
    schedule: ScheduleKind,
    micro_batches: usize,
    /// Mean seconds of a step over the faster half, as the machine may be busy with other work.
    pub(super) step_s: f64,
    /// Seconds per step that each rank computes.
    busy_s: Vec<f64>,
    /// Idle fraction predicted with equal times for all stages, and backward twice as long as forward.
    planned: f64,
    /// Idle fraction predicted with the measured mean times of forward and of both parts of backward.
    expected: f64,
}

impl Utilization {
    /// Measures a pipeline with its configuration. Parameters are not updated. Every rank of `world` must call it, with the
    /// group of its stages.
    ///
    /// # Errors
    /// Those of [`Pipeline::step`].
    pub(super) fn measure(
        pipeline: &mut Pipeline,
        config: &PipelineConfig,
        world: &dyn Communicator,
        stages: &dyn Communicator,
        (input, target): &(Tensor, Tensor),
    ) -> Result<Self> {
        let mut run = |steps: usize| -> Result<Vec<Sample>> {
            stages.run(Operation::Barrier)?;
            let mut began = Instant::now();
            let step = |_| {
                let step = pipeline.step(Some(input), Some(target))?;
                // From the end of one step to the end of the next.
                let before = std::mem::replace(&mut began, Instant::now());
                Ok(Sample::new((began - before).as_secs_f64(), &step.spans))
            };
            (0..steps).map(step).collect()
        };
        let (least, most, seconds) = COUNTED;
        let first = run(FIRST)?.iter().map(|sample| sample.seconds).sum::<f64>() / FIRST as f64;
        let steps = ((seconds / first) as usize).clamp(least, most);
        // The same for all copies of the pipeline, which average in each step.
        let samples = run(broadcast_object(world, &steps, 0)?)?;
        let ranks = mean_of_faster_half(all_gather_object(stages, &samples)?);
        let step_s = ranks.iter().map(|rank| rank.seconds).sum::<f64>() / ranks.len() as f64;
        let busy_s = ranks.iter().map(Sample::busy).collect();
        let (schedule, micro_batches) = (config.schedule, config.micro_batches);
        let plan = Schedule::of(schedule, stages.world_size(), config.stages_per_rank(), micro_batches)?;
        let idle = |durations: &Durations| plan.plan(durations).bubble_fraction();
        let pass = |index: usize| ranks.iter().map(|rank| rank.passes[index]).sum::<f64>();
        let measured = Durations {
            forward: pass(0),
            backward_input: pass(2) + pass(1) / 2.0,
            backward_weight: pass(3) + pass(1) / 2.0,
            message: 0.0,
        };
        let (planned, expected) = (idle(&Durations::default()), idle(&measured));
        Ok(Self { schedule, micro_batches, step_s, busy_s, planned, expected })
    }

    fn name(&self) -> String {
        let what = if self.micro_batches == 1 { "micro-batch" } else { "micro-batches" };
        format!("{}, {} {what}", self.schedule, self.micro_batches)
    }

    fn idle(&self) -> f64 {
        1.0 - self.busy_s.iter().sum::<f64>() / (self.step_s * self.busy_s.len() as f64)
    }
}

impl fmt::Display for Utilization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let busy = |(rank, busy): (usize, &f64)| format!("rank {rank} {:.1} %", 100.0 * busy / self.step_s);
        let busy: Vec<String> = self.busy_s.iter().enumerate().map(busy).collect();
        write!(
            f,
            "{}: {:.3} ms a step; busy: {}; idle {:.1} % ({:.1} % with passes as long as these), by the formula {:.1} %",
            self.name(),
            1e3 * self.step_s,
            busy.join(", "),
            100.0 * self.idle(),
            100.0 * self.expected,
            100.0 * self.planned
        )
    }
}

/// Measurements of one step on a rank.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Sample {
    seconds: f64,
    /// Seconds of computation: forward, backward, and input and weight backward where the schedule separates them.
    passes: [f64; 4],
}

impl Sample {
    fn new(seconds: f64, spans: &[Span]) -> Self {
        let kinds = [
            ActionKind::Forward,
            ActionKind::Backward,
            ActionKind::BackwardInput,
            ActionKind::BackwardWeight,
        ];
        let passes = kinds.map(|kind| {
            spans.iter().filter(|span| span.action.kind == kind).map(|span| span.end - span.start).sum()
        });
        Self { seconds, passes }
    }

    fn busy(&self) -> f64 {
        self.passes.iter().sum()
    }
}

/// Returns, by rank, the mean over the faster half of the steps.
fn mean_of_faster_half(ranks: Vec<Vec<Sample>>) -> Vec<Sample> {
    let steps = ranks.iter().map(Vec::len).min().unwrap_or(0);
    let seconds = |step: &usize| ranks.iter().map(|samples| samples[*step].seconds).sum::<f64>();
    let mut order: Vec<usize> = (0..steps).collect();
    order.sort_by(|a, b| seconds(a).total_cmp(&seconds(b)));
    order.truncate(steps.div_ceil(2));
    let mean = |samples: &Vec<Sample>| {
        let mut mean = Sample::default();
        let share = 1.0 / order.len().max(1) as f64;
        for sample in order.iter().map(|step| &samples[*step]) {
            mean.seconds += share * sample.seconds;
            mean.passes.iter_mut().zip(sample.passes).for_each(|(mean, pass)| *mean += share * pass);
        }
        mean
    };
    ranks.iter().map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_steps_do_not_count() {
        let sample = |seconds| Sample { seconds, passes: [seconds / 2.0, 0.0, 0.0, 0.0] };
        let rank = |times: [f64; 4]| times.map(sample).to_vec();
        let means = mean_of_faster_half(vec![rank([1.0, 9.0, 3.0, 9.0]), rank([2.0, 9.0, 2.0, 9.0])]);
        assert_eq!((means[0].seconds, means[1].seconds, means[0].busy()), (2.0, 2.0, 1.0));
    }
}
