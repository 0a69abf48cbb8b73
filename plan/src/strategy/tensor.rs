//! Cost of tensor parallelism: layers divided over ranks, with replicas.

use crate::collective::{all_reduce, part};
use crate::compare::Memory;
use crate::model::Model;

use super::{Estimate, Setting, Strategy, bytes_of, share};

pub(super) fn estimate(model: &Model, setting: &Setting, tp: usize, sequence_parallel: bool) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let (dp, model) = (ranks / tp, &*model.in_parts(tp as u64));
    let samples = share(batch_size, dp);
    let whole = model.sum(|unit| unit.whole.iter().sum());
    let own = model.sum(|unit| unit.divided.iter().sum::<u64>()) / tp as u64 + whole;
    let kept = kept(model, tp, sequence_parallel);
    let weights = (own * element) as f64;
    let memory = Memory {
        parameters: weights + (model.sum(|unit| unit.buffers) * element) as f64,
        buffers: 0.0,
        gradients: weights,
        optimizer: weights * setting.optimizer as f64,
        activations: bytes_of(kept, samples, element) + model.kept_apart(samples, 1, element),
    };
    let sent = along_tp(model, (tp, sequence_parallel), whole, (samples, element));
    let sent = sent + all_reduce(own * element, dp);
    Estimate { strategy: Strategy::Tensor { tp, sequence_parallel }, memory, sent }
}

/// Returns the activations kept per sample.
fn kept(model: &Model, tp: usize, sequence_parallel: bool) -> u64 {
    let kept = model.sum(|unit| unit.kept_divided) / tp as u64 + model.sum(|unit| unit.kept_whole);
    let between = model.sum(|unit| unit.kept_between);
    match sequence_parallel {
        // Operations keep their gathered inputs.
        true => kept + between / tp as u64 + model.sum(|unit| unit.kept_gathered) + gathered_for_loss(model),
        false => kept + between,
    }
}

/// Returns the elements per sample gathered for the loss: samples without a length are divided by batch under sequence
/// parallelism, and their outputs are gathered.
fn gathered_for_loss(model: &Model) -> u64 {
    model.units.last().filter(|_| model.length == 0).map_or(0, |unit| unit.output)
}

/// Returns the bytes sent between tensor-parallel ranks, all of which hold `whole` parameters.
fn along_tp(
    model: &Model,
    (tp, sequence_parallel): (usize, bool),
    whole: u64,
    (samples, element): (u64, u64),
) -> f64 {
    let (mut sent, bytes_of_samples) = (0.0, samples * element);
    for unit in &model.units {
        let (forward, small) = unit.forward.split_at(unit.forward.len() - unit.small);
        for elements in forward.iter().chain(&unit.backward) {
            let bytes = elements * bytes_of_samples;
            // An all-gather and a reduce-scatter, one of them forward and one backward, send as many bytes as an
            // all-reduce.
            sent += if sequence_parallel { 2.0 * part(bytes, tp) } else { all_reduce(bytes, tp) };
        }
        for (place, elements) in small.iter().enumerate() {
            // The first also carries the number of classes of each rank.
            let more = if place == 0 { tp as u64 * element } else { 0 };
            sent += all_reduce(elements * bytes_of_samples + more, tp);
        }
    }
    if sequence_parallel {
        sent += all_reduce(whole * element, tp);
        let gathered = model.sum(|unit| unit.gathered) + gathered_for_loss(model);
        sent += part(gathered * bytes_of_samples, tp);
    }
    sent
}
