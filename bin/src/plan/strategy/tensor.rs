//! Layers divided over ranks, and copies of that.

use crate::plan::collective::{all_reduce, part};
use crate::plan::model::Model;

use super::{Estimate, Memory, Setting, Strategy, bytes_of, share};

pub(super) fn estimate(model: &Model, setting: &Setting, tp: usize, sequence_parallel: bool) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let dp = ranks / tp;
    let samples = share(batch_size, dp);
    let whole = model.sum(|unit| unit.whole);
    let own = model.sum(|unit| unit.divided) / tp as u64 + whole;
    let (kept, inside) = kept(model, tp, sequence_parallel);
    let weights = (own * element) as f64;
    let memory = Memory {
        weights: weights + (model.sum(|unit| unit.buffers) * element) as f64,
        copies: 0.0,
        gradients: weights,
        optimizer: weights * setting.optimizer as f64,
        activations: bytes_of(kept, samples, element),
        inside: bytes_of(inside, samples, element),
    };
    let sent = along_tp(model, (tp, sequence_parallel), whole * element, samples * element);
    let sent = sent + all_reduce(own * element, dp);
    Estimate { strategy: Strategy::Tensor { tp, sequence_parallel }, memory, sent }
}

/// Activations of a sample, and those of them that operations keep to themselves.
fn kept(model: &Model, tp: usize, sequence_parallel: bool) -> (u64, u64) {
    let mut inside = model.sum(|unit| unit.kept_inside) / tp as u64;
    let mut kept = model.sum(|unit| unit.kept_divided) / tp as u64 + model.sum(|unit| unit.kept_loss);
    let between = model.sum(|unit| unit.kept_between);
    if sequence_parallel {
        // Operations keep what they have gathered.
        let gathered = model.sum(|unit| unit.kept_gathered);
        inside += gathered;
        kept += between / tp as u64 + gathered + put_together(model);
    } else {
        kept += between;
    }
    (kept, inside)
}

/// With sequence parallelism where there are no sequences it is the batch that is divided, and put together for the loss.
fn put_together(model: &Model) -> u64 {
    model.units.last().filter(|_| model.length == 0).map_or(0, |unit| unit.output)
}

/// What goes between the ranks that layers are divided over, with so many bytes for each number of a sample.
fn along_tp(
    model: &Model,
    (tp, sequence_parallel): (usize, bool),
    whole_bytes: u64,
    bytes_of_samples: u64,
) -> f64 {
    let mut sent = 0.0;
    for unit in &model.units {
        let (forward, small) = unit.forward.split_at(unit.forward.len() - unit.small);
        for elements in forward.iter().chain(&unit.backward) {
            let bytes = elements * bytes_of_samples;
            // In two parts, one forward and one backward, as many bytes as in one.
            sent += if sequence_parallel { 2.0 * part(bytes, tp) } else { all_reduce(bytes, tp) };
        }
        sent += small.iter().map(|elements| all_reduce(elements * bytes_of_samples, tp)).sum::<f64>();
    }
    if sequence_parallel {
        sent += all_reduce(whole_bytes, tp);
        let gathered = model.sum(|unit| unit.gathered) + put_together(model);
        sent += part(gathered * bytes_of_samples, tp);
    }
    sent
}
