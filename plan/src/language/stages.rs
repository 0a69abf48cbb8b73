//! Memory of pipeline stages: the units of each stage, and the micro-batches in flight.

use std::collections::HashMap;
use std::ops::Range;

use girandole::Layout;
use pipeline::{ActionKind, Schedule, Split};

use super::Memory;
use super::memory::{ADDITION_TENSORS, PersistentBytes, Plan, TemporaryBytes};
use crate::Result;

/// Number of messages for which receive buffers are posted ahead.
const POSTED_RECEIVES: f64 = 2.0;

impl Plan<'_> {
    /// Returns memory and bytes sent of each rank along `pp`.
    pub(super) fn pipeline(&self) -> Result<Vec<(Memory, f64)>> {
        let (kind, ranks) = (self.training.schedule, self.layout.pp);
        let micro_batches = self.training.micro_batches(self.layout);
        let schedule = Schedule::of(kind, ranks, kind.stages_per_rank(), micro_batches)?;
        let names: Vec<&str> = self.units.iter().map(|unit| unit.name.as_str()).collect();
        let costs: Vec<f64> = self.units.iter().map(|unit| unit.elements() as f64).collect();
        let ranges = Split::default().stages(&names, &costs, schedule.table().stages())?;
        let stages = Stages { plan: self, schedule: &schedule, ranges: &ranges };
        Ok((0..ranks).map(|rank| (stages.memory(rank), self.sent_stage(&schedule, &ranges, rank))).collect())
    }
}

/// Model divided into stages.
struct Stages<'a> {
    plan: &'a Plan<'a>,
    schedule: &'a Schedule,
    ranges: &'a [Range<usize>],
}

impl Stages<'_> {
    /// Returns the units of a rank.
    fn units(&self, rank: usize) -> Vec<usize> {
        owned_units(self.schedule, self.ranges, rank)
    }

    fn memory(&self, rank: usize) -> Memory {
        let (plan, units) = (self.plan, self.units(rank));
        let Layout { shard, .. } = *plan.layout;
        let sum = |of: &dyn Fn(usize) -> usize| units.iter().map(|place| of(*place) as f64).sum::<f64>();
        let all = sum(&|place| plan.units[place].elements());
        let trained = sum(&|place| plan.units[place].trained());
        let own = sum(&|place| plan.units[place].flat_share(shard));
        // Variables stay whole; the optimizer holds shards of them, and of their gradients.
        let fixed = PersistentBytes {
            parameters: all * plan.element(),
            gradients: own * plan.element(),
            optimizer: plan.optimizer(own),
            copies: if shard > 1 { own * plan.element() } else { 0.0 },
        };
        fixed.with(self.moments(rank, trained * plan.element()))
    }

    /// Returns the memory at each action: activations alive, and gradients with the action's temporary memory.
    fn moments(&self, rank: usize, gradients: f64) -> Vec<TemporaryBytes> {
        let plan = self.plan;
        let averages = plan.layout.data_ranks() > 1;
        let micro_batches = plan.training.micro_batches(plan.layout);
        let message = plan.kept.output() as f64 * plan.tokens;
        let messages = POSTED_RECEIVES * message;
        let (mut alive, mut sums, mut backwards) = (HashMap::new(), 0.0, 0);
        let mut moments = Vec::new();
        for action in &self.schedule.table().actions[rank] {
            let cell = (action.stage, action.micro_batch);
            let now = |alive: &HashMap<_, f64>| alive.values().sum::<f64>();
            match action.kind {
                ActionKind::Forward => {
                    alive.insert(cell, self.kept(action.stage));
                    moments.push(TemporaryBytes::new(now(&alive), sums + messages));
                }
                ActionKind::Backward => {
                    backwards += 1;
                    // If ranks average gradients, those of the last micro-batch are added one at a time.
                    let is_last = averages && backwards == micro_batches;
                    let fresh = if is_last { 0.0 } else { gradients };
                    let again = self.again(action.stage);
                    let own = plan.backward().max(self.embedding(action.stage)) + message;
                    moments.push(TemporaryBytes::new(now(&alive), sums + messages + self.loss(action.stage)));
                    let others = sums.max(if is_last { gradients } else { 0.0 }) + fresh + messages + own;
                    moments.push(TemporaryBytes::new(now(&alive) + again, others));
                    alive.remove(&cell);
                    sums = gradients;
                }
                ActionKind::BackwardInput => {
                    let own = plan.backward().max(self.loss(action.stage));
                    moments.push(TemporaryBytes::new(
                        now(&alive) + self.again(action.stage),
                        sums + messages + own,
                    ));
                }
                // Gradients of weights need the inputs of their layers.
                ActionKind::BackwardWeight => {
                    sums = gradients;
                    moments.push(TemporaryBytes::new(now(&alive), sums + messages));
                    alive.remove(&cell);
                }
                _ => {}
            }
        }
        if plan.layout.shard > 1 {
            // The shard of the gradients that the optimizer is passed, in addition to the whole gradients.
            moments.push(TemporaryBytes::new(0.0, gradients * (1.0 + 1.0 / plan.layout.shard as f64)));
        }
        moments
    }

    /// Returns the bytes that a stage keeps of a micro-batch, including its received input.
    fn kept(&self, stage: usize) -> f64 {
        let plan = self.plan;
        let received = if stage > 0 { plan.kept.output() } else { 0 };
        let of_unit = |place: usize| match place {
            0 => plan.kept.embedding(),
            place if plan.is_block(place) => plan.kept_of(place),
            _ => plan.kept.logits_and_loss(),
        };
        let kept: usize = self.ranges[stage].clone().map(of_unit).sum();
        (kept + received) as f64 * plan.tokens
    }

    fn again(&self, stage: usize) -> f64 {
        let again = self.ranges[stage].clone().filter(|place| self.plan.recomputes(*place));
        again.map(|place| self.plan.block_again(place)).fold(0.0, f64::max)
    }

    /// Returns the bytes of the gradients of all logits; one of the tensors reuses the probabilities.
    fn loss(&self, stage: usize) -> f64 {
        let plan = self.plan;
        let bytes = (ADDITION_TENSORS - 1.0) * plan.classes * plan.working() * plan.tokens;
        if stage + 1 == self.ranges.len() { bytes } else { 0.0 }
    }

    fn embedding(&self, stage: usize) -> f64 {
        if stage == 0 { self.plan.embedding() } else { 0.0 }
    }
}

/// Returns the units of all stages of a rank.
pub(super) fn owned_units(schedule: &Schedule, ranges: &[Range<usize>], rank: usize) -> Vec<usize> {
    let own = ranges.iter().zip(&schedule.table().owners).filter(|(_, owner)| **owner == rank);
    own.flat_map(|(range, _)| range.clone()).collect()
}
