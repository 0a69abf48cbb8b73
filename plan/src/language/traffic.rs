//! Bytes that a rank sends in a step.

use std::ops::Range;

use girandole::Layout;
use pipeline::{ActionKind, Schedule};
use training::build::Division;

use super::outline::{Layer, Unit};
use super::partition::{PartitionedModel, owned_units};
use crate::collective::{all_reduce, part};

impl PartitionedModel<'_> {
    /// Returns the bytes that a rank sends without pipeline stages.
    pub(super) fn sent_whole(&self) -> f64 {
        let Layout { dp, shard, ep, tp, .. } = self.layout;
        let micro_batches = self.training.micro_batches(&self.layout) as f64;
        let bytes = |elements: usize| (elements as f64 * self.element()) as u64;
        let divided: f64 = (0..self.units.len()).map(|place| self.sent_divided(place)).sum();
        let between: f64 = match (shard, dp) {
            (1, _) => self.averaged(self.units.iter(), self.holders()),
            _ => {
                let of_unit = |(place, unit): (usize, &Unit)| {
                    let (all, trained) = (self.bytes(place) as u64, bytes(unit.trained()));
                    // Gathered in forward and backward of each micro-batch; gradients are reduced at the end, with
                    // zeros for frozen parameters that are not in 4 bits.
                    let times = if place > 0 || trained > 0 { 2.0 } else { 1.0 };
                    // A tied head gathers the embedding once more.
                    let again = if self.is_tied && place == 0 { 1.0 } else { 0.0 };
                    let gathers = (times + again) * micro_batches;
                    let gradients = if trained > 0 { bytes(unit.wide_elements()) } else { 0 };
                    let experts = if ep > 1 { bytes(unit.trained_experts()).min(gradients) } else { 0 };
                    gathers * part(all, shard)
                        + part(gradients, shard)
                        + all_reduce((gradients - experts) / shard as u64, dp * ep)
                        + all_reduce(experts / shard as u64, dp)
                };
                self.units.iter().enumerate().map(of_unit).sum()
            }
        };
        let of_rows: f64 = (0..self.units.len()).map(|place| self.sent_with_rows(place)).sum();
        let between = between + self.sent_for_matrices(0..self.units.len());
        between + of_rows * micro_batches + if tp > 1 { divided * micro_batches } else { 0.0 }
    }

    /// Returns the bytes that a rank along `pp` sends.
    pub(super) fn sent_stage(&self, schedule: &Schedule, ranges: &[Range<usize>], rank: usize) -> f64 {
        let layout = &self.layout;
        let sends = [ActionKind::SendActivation, ActionKind::SendGradient];
        let messages = schedule.table().actions[rank].iter().filter(|action| sends.contains(&action.kind));
        let between = messages.count() as f64 * self.kept.output() as f64 * self.tokens;
        let units = owned_units(schedule, ranges, rank);
        let own = || units.iter().map(|place| &self.units[*place]);
        let trained = own().map(|unit| (unit.trained() as f64 * self.element()) as u64).sum();
        let micro_batches = self.training.micro_batches(layout) as f64;
        let divided: f64 = units.iter().map(|place| self.sent_divided(*place)).sum();
        let mut sent = between + self.averaged(own(), self.holders()) + part(trained, layout.shard);
        sent += units.iter().map(|place| self.sent_with_rows(*place)).sum::<f64>() * micro_batches;
        if layout.tp > 1 {
            sent += divided * micro_batches;
        }
        sent += self.sent_for_matrices(units.iter().copied());
        // Tied embedding and head on different ranks.
        let ends = [0, self.units.len() - 1].map(|place| units.contains(&place));
        let is_trained = self.units[0].trained() > 0;
        if self.is_tied && is_trained && ends[0] != ends[1] {
            sent += all_reduce((self.vocabulary * self.element()) as u64, 2);
        }
        sent
    }

    /// Returns the bytes that a rank sends to average the gradients of some units, of experts and of others over so many ranks.
    fn averaged<'u>(&self, units: impl Iterator<Item = &'u Unit>, [of_experts, all]: [usize; 2]) -> f64 {
        let bytes = |elements: usize| (elements as f64 * self.element()) as u64;
        let [mut experts, mut others] = [0; 2];
        for unit in units {
            let own = if self.layout.ep > 1 { unit.trained_experts() } else { 0 };
            experts += bytes(own);
            others += bytes(unit.trained() - own);
        }
        all_reduce(others, all) + all_reduce(experts, of_experts)
    }

    /// Returns the bytes that a rank sends in a unit for a micro-batch: along `cp` keys, values and their gradients, along `ep` rows
    /// and their gradients.
    fn sent_with_rows(&self, place: usize) -> f64 {
        self.exchanged(place).iter().chain(&self.sent_to_experts(place)).sum()
    }

    /// Returns the bytes that a rank of `ep` sends in a unit for a micro-batch, forward and backward, if experts are equally loaded:
    /// rows of tokens to their experts and results back, and the numbers of rows; and the gradients of both.
    pub(super) fn sent_to_experts(&self, place: usize) -> [f64; 2] {
        let ep = self.layout.ep;
        let experts = self.subject.config.experts.as_ref();
        let is_sparse = ep > 1 && self.units[place].layers.iter().any(Layer::is_expert);
        let Some(experts) = experts.filter(|_| is_sparse) else { return [0.0; 2] };
        let rows = self.tokens * experts.per_token as f64 * (ep - 1) as f64 / ep as f64;
        let both = 2.0 * rows * self.kept.output() as f64;
        let counts = ((ep - 1) * experts.count * size_of::<u32>()) as f64;
        let again = if self.recomputes_products(place) { both + counts } else { 0.0 };
        [both + counts, both + again]
    }

    /// Returns the bytes that a rank of `cp` sends in a unit for a micro-batch, forward and backward: keys and values; these again, and
    /// their gradients.
    pub(super) fn exchanged(&self, place: usize) -> [f64; 2] {
        if self.cp < 2 || !self.is_block(place) {
            return [0.0; 2];
        }
        /// The share of a rank's keys that another rank sees, in the mean: all of half of the ranks, of the others one of two parts.
        const SEEN: f64 = 0.75;
        let again = if self.recomputes_products(place) { 2.0 } else { 1.0 };
        let numbers = self.kept.keys_and_values() as f64 * self.tokens * (self.cp - 1) as f64 * SEEN;
        [numbers * self.element(), numbers * (again * self.element() + self.working())]
    }

    /// Returns the bytes exchanged by tensor-parallel ranks in a unit for a micro-batch, forward and backward.
    fn sent_divided(&self, place: usize) -> f64 {
        let tp = self.layout.tp;
        if tp < 2 {
            return 0.0;
        }
        let reduce = |numbers: f64| all_reduce((numbers * self.tokens * self.element()) as u64, tp);
        let hidden = self.kept.output() as f64 / self.element();
        if !self.is_block(place) {
            return reduce(hidden);
        }
        let times = if self.recomputes_products(place) { 2.0 } else { 1.0 };
        // Experts have one sum forward and one backward for all of them.
        let unit = &self.units[place];
        let experts =
            if unit.layers.iter().any(Layer::is_expert) { (1.0 + times) * reduce(hidden) } else { 0.0 };
        let of_layer = |layer: &Layer| match layer.division {
            _ if layer.is_expert() => 0.0,
            Division::Whole => 0.0,
            Division::Inputs => times * reduce(layer.outputs as f64),
            Division::Outputs => reduce(layer.inputs as f64),
        };
        unit.layers.iter().map(of_layer).sum::<f64>() + experts
    }
}
