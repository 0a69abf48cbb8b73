//! Memory of pipeline stages: the units of each stage, and the micro-batches in flight.

use std::collections::HashMap;
use std::ops::Range;

use girandole::Layout;
use pipeline::{ActionKind, Schedule};

use super::memory::{PersistentBytes, TemporaryBytes};
use super::outline::Parameter;
use super::partition::{PartitionedModel, owned_units};
use crate::Result;
use crate::compare::Memory;

/// Number of messages for which receive buffers are posted ahead.
const POSTED_RECEIVES: f64 = 2.0;

impl PartitionedModel<'_> {
    /// Returns memory and bytes sent of each rank along `pp`.
    pub(super) fn pipeline(&self) -> Result<Vec<(Memory, f64)>> {
        let (schedule, ranges) = self.stages()?;
        let stages = Stages { model: self, schedule: &schedule, ranges: &ranges };
        Ok((0..self.layout.pp)
            .map(|rank| (stages.memory(rank), self.sent_stage(&schedule, &ranges, rank)))
            .collect())
    }

    /// Returns the memory of each rank along `pp` in a forward pass alone, micro-batch by micro-batch.
    pub(super) fn passes(&self) -> Result<Vec<Memory>> {
        let (schedule, ranges) = self.stages()?;
        let stages = Stages { model: self, schedule: &schedule, ranges: &ranges };
        Ok((0..self.layout.pp).map(|rank| stages.pass(rank)).collect())
    }
}

/// Model divided into stages.
struct Stages<'a> {
    model: &'a PartitionedModel<'a>,
    schedule: &'a Schedule,
    ranges: &'a [Range<usize>],
}

impl Stages<'_> {
    /// Returns the units of a rank.
    fn units(&self, rank: usize) -> Vec<usize> {
        owned_units(self.schedule, self.ranges, rank)
    }

    /// Returns the memory of a rank in the forward pass of a model that is not trained. Its stages are whole, also with `shard`, which
    /// divides what belongs to an optimizer.
    fn pass(&self, rank: usize) -> Memory {
        let (model, units) = (self.model, self.units(rank));
        let parameters = units.iter().map(|place| model.bytes(*place)).sum();
        let message = model.kept.output() as f64 * model.tokens;
        let moments = units.iter().map(|place| {
            let TemporaryBytes { activations, others } = model.alone(*place);
            TemporaryBytes::new(activations, others + POSTED_RECEIVES * message)
        });
        PersistentBytes { parameters, ..PersistentBytes::default() }.with(moments)
    }

    fn memory(&self, rank: usize) -> Memory {
        let (model, units) = (self.model, self.units(rank));
        let Layout { shard, .. } = model.layout;
        let sum = |of: &dyn Fn(usize) -> usize| units.iter().map(|place| of(*place) as f64).sum::<f64>();
        let trained = sum(&|place| model.units[place].trained());
        let own = sum(&|place| model.units[place].flat_share(shard, |tensor| tensor.is_trained));
        let hidden = sum(&|place| model.units[place].flat_share(shard, Parameter::is_hidden));
        // Variables stay whole; the optimizer holds shards of them, and of their gradients.
        let fixed = PersistentBytes {
            parameters: units.iter().map(|place| model.bytes(*place)).sum(),
            gradients: own * model.element(),
            optimizer: model.optimizer(own, hidden),
            copies: if shard > 1 { own * model.element() } else { 0.0 },
        };
        let step = model.optimizer_step(units.iter().copied(), hidden, fixed.gradients);
        fixed.with(self.moments(rank, trained * model.element()).into_iter().chain(step))
    }

    /// Returns the memory at each action: activations alive, and gradients with the action's temporary memory.
    fn moments(&self, rank: usize, gradients: f64) -> Vec<TemporaryBytes> {
        let model = self.model;
        let largest = model.largest_in_32_bits(self.units(rank));
        let message = model.kept.output() as f64 * model.tokens;
        let (kept, alive, sums, backwards, moments) = Default::default();
        let mut step = Step { stages: self, largest, message, kept, alive, sums, backwards, moments };
        for action in &self.schedule.table().actions[rank] {
            let cell = (action.stage, action.micro_batch);
            match action.kind {
                ActionKind::Forward => step.forward(cell),
                ActionKind::Backward => step.backward(cell),
                ActionKind::BackwardInput => step.backward_input(cell),
                ActionKind::BackwardWeight => step.backward_weight(cell),
                _ => {}
            }
        }
        let mut moments = step.moments;
        if model.layout.shard > 1 {
            // The shard of the gradients that the optimizer is passed, in addition to the whole gradients.
            moments.push(TemporaryBytes::new(0.0, gradients * (1.0 + 1.0 / model.layout.shard as f64)));
        }
        moments
    }

    /// Returns the bytes that a stage keeps of a micro-batch, including its received input.
    fn kept(&self, stage: usize) -> f64 {
        let model = self.model;
        let received = if stage > 0 { model.kept.output() } else { 0 };
        let of_unit = |place: usize| match place {
            0 => model.kept.embedding(),
            place if model.is_block(place) => model.kept_of(place),
            _ => model.kept.loss(),
        };
        let kept: usize = self.ranges[stage].clone().map(of_unit).sum();
        let of_head = self.of_last(stage, model.kept_head());
        (kept + received) as f64 * model.tokens + of_head
    }

    fn again(&self, stage: usize) -> f64 {
        let again = self.ranges[stage].clone().filter(|place| self.model.recomputes(*place));
        again.map(|place| self.model.block_again(place)).fold(0.0, f64::max)
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.ranges.len()
    }

    /// Returns the bytes, if the stage is the last one.
    fn of_last(&self, stage: usize, bytes: f64) -> f64 {
        if self.is_last(stage) { bytes } else { 0.0 }
    }

    /// Returns the bytes of the gradients of some of a stage's units.
    fn gradients(&self, stage: usize, of: impl Fn(usize) -> bool) -> f64 {
        let places = self.ranges[stage].clone().filter(|place| of(*place));
        places.map(|place| self.model.units[place].trained() as f64 * self.model.element()).sum()
    }

    /// Returns the bytes of the gradients of a stage's embedding and head, which backward computes with those of
    /// activations.
    fn tables(&self, stage: usize) -> f64 {
        self.gradients(stage, |place| place == 0 || place + 1 == self.model.units.len())
    }

    /// Returns the bytes that the loss keeps until its backward, which makes them a gradient.
    fn passed(&self, stage: usize) -> f64 {
        self.of_last(stage, self.model.passed_head())
    }

    fn embedding(&self, stage: usize) -> f64 {
        if stage == 0 { self.model.embedding() } else { 0.0 }
    }
}

/// A rank's step: its memory after each action so far.
struct Step<'a> {
    stages: &'a Stages<'a>,
    /// Bytes of the largest gradient in 32 bits, if gradients have 16.
    largest: f64,
    /// Bytes of a message between stages.
    message: f64,
    /// Bytes kept, by stage and micro-batch, and their sum.
    kept: HashMap<(usize, usize), f64>,
    alive: f64,
    /// Bytes of the sums of gradients, by stage.
    sums: HashMap<usize, f64>,
    /// Number of backward passes, by stage.
    backwards: HashMap<usize, usize>,
    moments: Vec<TemporaryBytes>,
}

impl Step<'_> {
    fn keep(&mut self, cell: (usize, usize), bytes: f64) {
        self.alive += bytes - self.kept.insert(cell, bytes).unwrap_or_default();
    }

    fn release(&mut self, cell: (usize, usize)) {
        self.alive -= self.kept.remove(&cell).unwrap_or_default();
    }

    fn moment(&mut self, activations: f64, others: f64) {
        let (sums, messages) = (self.sums.values().sum::<f64>(), POSTED_RECEIVES * self.message);
        self.moments.push(TemporaryBytes::new(activations, others + sums + messages));
    }

    fn forward(&mut self, cell: (usize, usize)) {
        let (stages, stage) = (self.stages, cell.0);
        self.keep(cell, stages.kept(stage));
        self.moment(self.alive, stages.of_last(stage, stages.model.loss_forward()));
    }

    fn backward(&mut self, cell: (usize, usize)) {
        let (stages, stage) = (self.stages, cell.0);
        let model = stages.model;
        self.moment(self.alive, stages.of_last(stage, model.loss_backward()));
        let count = *self.backwards.entry(stage).and_modify(|count| *count += 1).or_insert(1);
        let micro_batches = model.training.micro_batches(&model.layout);
        let (all, tables, embedding) = (
            stages.gradients(stage, |_| true),
            stages.tables(stage),
            stages.gradients(stage, |place| place == 0),
        );
        // If ranks average gradients, those of matrix products are added one at a time in the last micro-batch.
        let fresh = match model.layout.data_ranks() > 1 && count == micro_batches {
            true => {
                self.sums.insert(stage, model.summed(all));
                if count > 1 { tables } else { embedding }
            }
            false => all,
        };
        let left = self.alive - stages.passed(stage);
        self.moment(left + stages.again(stage), fresh - embedding + model.backward() + self.message);
        self.moment(left, fresh + stages.embedding(stage) + self.message);
        self.release(cell);
        self.sums.insert(stage, model.summed(all));
        self.moment(self.alive, self.largest);
    }

    fn backward_input(&mut self, cell: (usize, usize)) {
        let (stages, stage) = (self.stages, cell.0);
        let (model, tables) = (stages.model, stages.tables(stage));
        self.moment(self.alive, stages.of_last(stage, model.loss_backward()));
        let left = self.alive - stages.passed(stage);
        self.moment(left + stages.again(stage), tables + model.backward());
        if let Some(&kept) = self.kept.get(&cell) {
            self.keep(cell, kept - stages.of_last(stage, model.kept_head()));
        }
        self.sums.entry(stage).or_insert(model.summed(tables));
    }

    /// Gradients of weights need the inputs of their layers.
    fn backward_weight(&mut self, cell: (usize, usize)) {
        self.sums.insert(cell.0, self.stages.model.summed(self.stages.gradients(cell.0, |_| true)));
        self.moment(self.alive, 0.0);
        self.release(cell);
    }
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use models::{Lora, LoraConfig, ModelConfig};

    use super::*;
    use crate::language::{Subject, Training};

    /// Otherwise most of the time and memory of a plan for many ranks goes into schedules that are refused.
    #[test]
    fn too_many_stages_are_refused_before_their_schedule_is_made() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/fixtures/llama");
        let subject = Subject::new(ModelConfig::from_folder(folder.as_ref()).unwrap(), None);
        // Of a size that no schedule may have.
        let layout = Layout { pp: 1 << 20, ..Layout::default() };
        let training = Training { batch_size: 1 << 20, ..Training::default() };
        let refused = subject.estimate(&training, &layout).unwrap_err().to_string();
        assert!(refused.contains("1048576 stages"), "{refused}");
    }

    /// Of a frozen embedding only the parameters grow with the vocabulary, no sums of gradients.
    #[test]
    fn gradients_are_summed_of_what_is_trained() {
        let layout: Layout = "pp=2".parse().unwrap();
        let training = Training { batch_size: 2, length: 4, dtype: DType::BF16, ..Training::default() };
        let first = |vocabulary: usize| {
            let json = format!(
                r#"{{"model_type": "llama", "vocab_size": {vocabulary}, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
                "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
                "initializer_range": 0.02, "tie_word_embeddings": false, "rope_theta": 10000.0}}"#
            );
            let model = ModelConfig::from_json(&json).unwrap();
            let lora = Lora::new(&LoraConfig::default(), &model).unwrap();
            let cost = Subject::new(model, Some(lora)).estimate(&training, &layout).unwrap();
            cost.stages[0].memory.total()
        };
        assert_eq!(first(200_000) - first(100_000), (100_000 * 16 * DType::BF16.size_in_bytes()) as f64);
    }
}
