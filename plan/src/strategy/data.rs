//! Cost of data parallelism: a replica of the whole model on each rank.

use crate::collective::{all_reduce, all_reduce_of_first, broadcast};
use crate::compare::Memory;
use crate::model::{Model, Unit};

use super::{Estimate, Setting, Strategy, bytes_of, share};

pub(super) fn estimate(model: &Model, setting: &Setting) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let parameters = (model.parameters() * element) as f64;
    let buffers = model.sum(|unit| unit.buffers) * element;
    let samples = share(batch_size, ranks);
    let memory = Memory {
        parameters: parameters + buffers as f64,
        // The model computes with these, while the optimizer changes the variables.
        buffers: parameters,
        gradients: parameters,
        optimizer: parameters * setting.optimizer as f64,
        activations: bytes_of(model.sum(Unit::kept), samples, element)
            + model.kept_apart(samples, 1, element),
    };
    // Including one number per tensor, which tells whether it was used.
    let averaged = (model.parameters() + model.sum(|unit| unit.tensors().count() as u64)) * element;
    // The buffers of rank 0 are broadcast to all ranks.
    let of_first = all_reduce_of_first(averaged, ranks) + broadcast(buffers, ranks);
    let sent = all_reduce(averaged, ranks).max(of_first);
    Estimate { strategy: Strategy::Data, memory, sent }
}
