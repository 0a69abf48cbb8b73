//! Copies of the whole model.

use crate::collective::{all_reduce, all_reduce_of_first, broadcast};
use crate::model::{Model, Unit};

use super::{Estimate, Memory, Setting, Strategy, bytes_of, share};

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
        activations: bytes_of(model.sum(Unit::kept), samples, element)
            + model.kept_apart(samples, 1, element),
    };
    // With a number for each tensor, which says whether it was used.
    let averaged = (model.parameters() + model.sum(|unit| unit.tensors.len() as u64)) * element;
    // The first rank's buffers are all ranks'.
    let of_first = all_reduce_of_first(averaged, ranks) + broadcast(buffers, ranks);
    let sent = all_reduce(averaged, ranks).max(of_first);
    Estimate { strategy: Strategy::Data, memory, sent }
}
