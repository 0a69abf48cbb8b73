//! Copies of the whole model.

use crate::plan::collective::{Traffic, all_reduce, all_reduce_of_first, broadcast};
use crate::plan::model::{Model, Unit};

use super::{Estimate, Memory, Setting, Strategy, beside_backward, computing, share};

pub(super) fn estimate(model: &Model, setting: &Setting) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let parameters = (model.parameters() * element) as f64;
    let buffers = model.sum(|unit| unit.buffers) * element;
    let samples = share(batch_size, ranks);
    let memory = Memory {
        weights: parameters + buffers as f64,
        // The model computes with these, while the optimizer changes the variables.
        copies: parameters,
        gradients: parameters,
        optimizer: parameters * setting.optimizer as f64,
        activations: (model.sum(Unit::kept) * samples * element) as f64,
        inside: (model.sum(|unit| unit.kept_inside) * samples * element) as f64,
    };
    // With a number for each tensor, which says whether it was used.
    let averaged = (model.parameters() + model.sum(|unit| unit.tensors.len() as u64)) * element;
    // The first rank's buffers are all ranks'.
    let mut of_first = all_reduce_of_first(averaged, ranks);
    of_first += broadcast(buffers, ranks);
    let most = all_reduce(averaged, ranks);
    let traffic = Traffic { bytes: most.bytes.max(of_first.bytes), steps: most.steps.max(of_first.steps) };
    let compute = computing(model.flops(), samples, setting);
    let waiting = beside_backward(traffic.seconds(setting.bandwidth, setting.latency), compute);
    Estimate { strategy: Strategy::Data, memory, sent: traffic.bytes, seconds: compute + waiting, waiting }
}
