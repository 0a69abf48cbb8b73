//! What a strategy needs: memory by kind, bytes sent, time.

use super::collective::{Traffic, all_reduce, message, part};
use super::model::{Model, Unit};

/// A way to spread a model over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Strategy {
    /// The whole model on every rank (`ddp`).
    Data,
    /// Every parameter divided over the ranks, and gathered where it is needed (`fsdp`).
    ShardedData,
    /// Layers divided over `tp` ranks, copies of that on the others (`tensor-parallel`).
    Tensor {
        /// Ranks that each layer is divided over.
        tp: usize,
        /// Whether activations between the layers are divided, too.
        sequence_parallel: bool,
    },
    /// The model cut into as many stages as there are ranks (`pipeline`).
    Pipeline,
}

/// What is planned for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Setting {
    /// Ranks.
    pub ranks: usize,
    /// Samples a step, on all ranks together.
    pub batch_size: usize,
    /// Micro-batches of a pipeline.
    pub micro_batches: usize,
    /// Bytes of a number.
    pub element: u64,
    /// Numbers that the optimizer remembers of each parameter.
    pub optimizer: u64,
    /// Bytes a second that a rank sends.
    pub bandwidth: f64,
    /// Seconds of a step of communication.
    pub latency: f64,
    /// Operations a second of a rank.
    pub flops: f64,
}

/// Bytes on the rank that has the most, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Memory {
    /// Parameters.
    pub weights: f64,
    /// Copies of parameters that the strategy needs beside them.
    pub copies: f64,
    /// Gradients.
    pub gradients: f64,
    /// What the optimizer remembers.
    pub optimizer: f64,
    /// What forward keeps for backward.
    pub activations: f64,
}

impl Memory {
    /// All kinds.
    pub fn total(&self) -> f64 {
        self.weights + self.copies + self.gradients + self.optimizer + self.activations
    }
}

/// What a strategy needs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The strategy.
    pub strategy: Strategy,
    /// Memory of a rank.
    pub memory: Memory,
    /// Bytes that a rank sends in a step.
    pub sent: f64,
    /// Seconds of a step.
    pub seconds: f64,
    /// Of these, what nothing is computed in.
    pub waiting: f64,
}

impl Strategy {
    /// Those that so many ranks allow, the simplest first.
    pub fn all(model: &Model, setting: &Setting) -> Vec<Self> {
        let ranks = setting.ranks;
        if ranks == 1 {
            return vec![Self::Tensor { tp: 1, sequence_parallel: false }];
        }
        let mut all = vec![Self::Data, Self::ShardedData];
        for tp in (2..=ranks).filter(|tp| ranks.is_multiple_of(*tp)) {
            if model.divisors.is_empty()
                || !model.divisors.iter().all(|(_, size)| size.is_multiple_of(tp as u64))
            {
                continue;
            }
            all.push(Self::Tensor { tp, sequence_parallel: false });
            let rows =
                if model.length > 0 { model.length } else { (setting.batch_size / (ranks / tp)) as u64 };
            if rows > 0 && rows.is_multiple_of(tp as u64) {
                all.push(Self::Tensor { tp, sequence_parallel: true });
            }
        }
        if model.units.len() >= ranks {
            all.push(Self::Pipeline);
        }
        all
    }

    /// Its name, on so many ranks.
    pub fn name(self, ranks: usize) -> String {
        match self {
            Self::Data => format!("dp {ranks}"),
            Self::ShardedData => format!("fsdp {ranks}"),
            Self::Pipeline => format!("pipeline {ranks}"),
            Self::Tensor { tp: 1, .. } if ranks == 1 => "one process".into(),
            Self::Tensor { tp, sequence_parallel } => {
                let dp = ranks / tp;
                let copies = if dp > 1 { format!(", dp {dp}") } else { String::new() };
                format!("tp {tp}{}{copies}", if sequence_parallel { " sequence" } else { "" })
            }
        }
    }

    /// What it needs.
    pub fn estimate(self, model: &Model, setting: &Setting) -> Estimate {
        match self {
            Self::Data => data(model, setting),
            Self::ShardedData => sharded(model, setting),
            Self::Tensor { tp, sequence_parallel } => tensor(model, setting, tp, sequence_parallel),
            Self::Pipeline => pipeline(model, setting),
        }
    }
}

/// Samples of a rank where a batch is divided over so many.
fn share(batch_size: usize, ranks: usize) -> u64 {
    batch_size.div_ceil(ranks).max(1) as u64
}

/// Seconds of forward and backward, which is twice as much again.
fn computing(flops: u64, samples: u64, setting: &Setting) -> f64 {
    3.0 * flops as f64 * samples as f64 / setting.flops
}

fn kept(unit: &Unit) -> u64 {
    unit.kept_divided + unit.kept_between
}

fn data(model: &Model, setting: &Setting) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let parameters = (model.parameters() * element) as f64;
    let samples = share(batch_size, ranks);
    let activations = (model.units.iter().map(kept).sum::<u64>() * samples * element) as f64;
    let memory = Memory {
        weights: parameters,
        // The model computes with these, while the optimizer changes the variables.
        copies: parameters,
        gradients: parameters,
        optimizer: parameters * setting.optimizer as f64,
        activations,
    };
    let traffic = all_reduce(model.parameters() * element, ranks);
    let compute = computing(model.flops(), samples, setting);
    // Under way while backward computes, which is two thirds of it.
    let waiting = (traffic.seconds(setting.bandwidth, setting.latency) - compute * 2.0 / 3.0).max(0.0);
    Estimate { strategy: Strategy::Data, memory, sent: traffic.bytes, seconds: compute + waiting, waiting }
}

fn sharded(model: &Model, setting: &Setting) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let own = (model.parameters() * element) as f64 / ranks as f64;
    let samples = share(batch_size, ranks);
    let largest = model.units.iter().map(|unit| unit.divided + unit.whole).max().unwrap_or(0);
    let memory = Memory {
        weights: own,
        // The largest unit's parameters, gathered, and their gradients before they are divided.
        copies: (2 * largest * element) as f64,
        gradients: own,
        optimizer: own * setting.optimizer as f64,
        activations: (model.units.iter().map(kept).sum::<u64>() * samples * element) as f64,
    };
    // Each unit is gathered forward and backward, and its gradient is summed and divided.
    let unit = |unit: &Unit| part((unit.divided + unit.whole) * element, ranks).times(3);
    let traffic: Traffic = model.units.iter().map(unit).sum();
    let compute = computing(model.flops(), samples, setting);
    let waiting = traffic.seconds(setting.bandwidth, setting.latency);
    let strategy = Strategy::ShardedData;
    Estimate { strategy, memory, sent: traffic.bytes, seconds: compute + waiting, waiting }
}

fn tensor(model: &Model, setting: &Setting, tp: usize, sequence_parallel: bool) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let dp = ranks / tp;
    let samples = share(batch_size, dp);
    let sum = |count: fn(&Unit) -> u64| model.units.iter().map(count).sum::<u64>();
    let whole = sum(|unit| unit.whole);
    let own = sum(|unit| unit.divided) / tp as u64 + whole;
    let mut kept = sum(|unit| unit.kept_divided) / tp as u64;
    kept += match sequence_parallel {
        true => sum(|unit| unit.kept_between) / tp as u64 + sum(|unit| unit.kept_gathered),
        false => sum(|unit| unit.kept_between),
    };
    let weights = (own * element) as f64;
    let memory = Memory {
        weights,
        copies: 0.0,
        gradients: weights,
        optimizer: weights * setting.optimizer as f64,
        activations: (kept * samples * element) as f64,
    };
    let mut traffic = Traffic::default();
    for unit in &model.units {
        let (forward, small) = unit.forward.split_at(unit.forward.len() - unit.small);
        for elements in forward.iter().chain(&unit.backward) {
            let bytes = elements * samples * element;
            // In two parts, one forward and one backward, as many bytes as in one.
            traffic += if sequence_parallel { part(bytes, tp).times(2) } else { all_reduce(bytes, tp) };
        }
        traffic += small.iter().map(|elements| all_reduce(elements * samples * element, tp)).sum();
    }
    if sequence_parallel {
        traffic += all_reduce(whole * element, tp);
        let mut gathered: u64 = model.units.iter().map(|unit| unit.gathered).sum();
        if model.length == 0 {
            // It is the batch that is divided, and put together in the end.
            gathered += model.units.last().map_or(0, |unit| unit.output);
        }
        traffic += part(gathered * samples * element, tp);
    }
    traffic += all_reduce(own * element, dp);
    let compute = computing(model.flops(), samples, setting) / tp as f64;
    let waiting = traffic.seconds(setting.bandwidth, setting.latency);
    let strategy = Strategy::Tensor { tp, sequence_parallel };
    Estimate { strategy, memory, sent: traffic.bytes, seconds: compute + waiting, waiting }
}

fn pipeline(model: &Model, setting: &Setting) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let stages = stages(&model.units, ranks);
    let largest = |of: fn(&Unit) -> u64| {
        stages.iter().map(|stage| stage.iter().map(of).sum::<u64>()).max().unwrap_or(0)
    };
    let weights = (largest(|unit| unit.divided + unit.whole) * element) as f64;
    let memory = Memory {
        weights,
        copies: 0.0,
        gradients: weights,
        optimizer: weights * setting.optimizer as f64,
        // All micro-batches are kept until backward begins.
        activations: (largest(kept) * batch_size as u64 * element) as f64,
    };
    // What a stage sends on, and the gradient of what it was sent; the ends send one of them.
    let sent = |place: usize| {
        let output = |place: usize| stages[place].last().map_or(0, |unit| unit.output);
        let forward = if place + 1 < ranks { output(place) } else { 0 };
        forward + if place > 0 { output(place - 1) } else { 0 }
    };
    let bytes = (0..ranks).map(sent).max().unwrap_or(0) * batch_size as u64 * element;
    let micro = setting.micro_batches.clamp(1, batch_size.max(1));
    let traffic = Traffic { bytes: bytes as f64, steps: message(0).steps * 2.0 * micro as f64 };
    let busy = computing(largest(|unit| unit.flops), batch_size as u64, setting);
    // The first and the last micro-batch leave the other stages without work.
    let idle = busy * (ranks - 1) as f64 / micro as f64;
    let waiting = idle + traffic.seconds(setting.bandwidth, setting.latency);
    Estimate { strategy: Strategy::Pipeline, memory, sent: traffic.bytes, seconds: busy + waiting, waiting }
}

/// Units in a row, cut so that each stage has about the same number of parameters and one unit at least.
fn stages(units: &[Unit], ranks: usize) -> Vec<&[Unit]> {
    let size = |units: &[Unit]| units.iter().map(|unit| unit.divided + unit.whole).sum::<u64>() as f64;
    let mut rest = units;
    let mut stages = Vec::with_capacity(ranks);
    for left in (1..=ranks).rev() {
        let fair = size(rest) / left as f64;
        let most = rest.len() + 1 - left;
        let distance = |count: &usize| (size(&rest[..*count]) - fair).abs();
        let best = (1..=most).min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap_or(most);
        let count = if left == 1 { rest.len() } else { best };
        let (stage, others) = rest.split_at(count);
        stages.push(stage);
        rest = others;
    }
    stages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_about_equal_and_none_is_empty() {
        let units: Vec<Unit> =
            [5, 1, 1, 1, 1, 5].map(|whole| Unit { whole, ..Unit::default() }).into_iter().collect();
        for ranks in 1..=6 {
            let stages = stages(&units, ranks);
            assert_eq!(stages.len(), ranks);
            assert!(stages.iter().all(|stage| !stage.is_empty()));
            assert_eq!(stages.concat(), units);
        }
        let sizes: Vec<usize> = stages(&units, 2).iter().map(|stage| stage.len()).collect();
        assert_eq!(sizes, [3, 3]);
    }
}
