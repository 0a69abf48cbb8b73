//! Cost of sharded data parallelism: parameters sharded over ranks, and gathered part by part.

use fsdp::FsdpConfig;

use crate::collective::{all_reduce, part};
use crate::compare::Memory;
use crate::model::{Model, Part, Unit};

use super::{Estimate, Setting, Sharding, Strategy, bytes_of, share};

pub(super) fn estimate(model: &Model, setting: &Setting, sharding: Sharding) -> Estimate {
    let &Setting { ranks, batch_size, element, .. } = setting;
    let shards = sharding.ranks(ranks);
    let parts: Vec<Part> = model.units.iter().flat_map(|unit| unit.parts.clone()).collect();
    let samples = share(batch_size, ranks);
    let own = parts.iter().map(|one| own(one, shards)).sum::<u64>() * element;
    let memory = Memory {
        parameters: (own + model.sum(|unit| unit.buffers) * element) as f64,
        buffers: gathered(&parts, sharding) as f64 * setting.gathered as f64,
        gradients: gradients(&parts, shards, setting),
        optimizer: own as f64 * setting.optimizer as f64,
        activations: activations(model, &parts, samples, setting),
    };
    let sent = sent(&parts, shards, sharding, setting);
    Estimate { strategy: Strategy::ShardedData(sharding), memory, sent }
}

/// Returns the number of elements in a rank's shard of a part.
fn own(part: &Part, shards: usize) -> u64 {
    part.parameters().div_ceil(shards as u64)
}

/// Returns the largest number of gathered elements: the buffers of two parts (the one that computes and the next one),
/// or of all parts if they are kept; plus the small tensors, which are copied out of their buffers.
fn gathered(parts: &[Part], sharding: Sharding) -> u64 {
    let limit = FsdpConfig::default().pack_elements as u64;
    let mut sizes: Vec<u64> = parts.iter().map(Part::parameters).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let buffers: u64 = sizes.iter().take(2).sum();
    let small = parts.iter().map(|part| part.of_small(limit));
    match sharding {
        Sharding::Full | Sharding::Hybrid { .. } => buffers + small.max().unwrap_or(0),
        Sharding::GradOp | Sharding::None => {
            let small: u64 = small.sum();
            sizes.iter().sum::<u64>() + small.min(buffers)
        }
    }
}

/// Returns the largest number of bytes of gradients: this rank's shards of the parts that backward has processed, the
/// whole gradients of the current part, and those of the part before it, which are being reduced.
fn gradients(parts: &[Part], shards: usize, setting: &Setting) -> f64 {
    let (mut kept, mut most, mut leaving) = (0, 0, 0);
    for part in parts.iter().rev() {
        kept += own(part, shards) * setting.element;
        let whole = part.parameters() * setting.gathered;
        most = most.max(kept + whole + leaving);
        leaving = if shards > 1 { whole } else { 0 };
    }
    most as f64
}

fn activations(model: &Model, parts: &[Part], samples: u64, setting: &Setting) -> f64 {
    let mut kept = model.sum(|unit| unit.kept() - unit.kept_inside);
    // The output of each part is copied by the boundary operation, at which backward stops for the part.
    kept += parts.iter().map(|part| part.output).sum::<u64>();
    let mut wide = model.sum(|unit| unit.kept_inside);
    if setting.gathered < setting.element {
        // The loss is computed in higher precision.
        wide += model.units.last().map_or(0, |unit: &Unit| unit.output);
    }
    let apart = model.kept_apart(samples, 1, setting.element);
    bytes_of(kept, samples, setting.gathered) + bytes_of(wide, samples, setting.element) + apart
}

fn sent(parts: &[Part], shards: usize, sharding: Sharding, setting: &Setting) -> f64 {
    // Gathered in forward, and again in backward unless kept; gradients are reduce-scattered.
    let times = if sharding == Sharding::GradOp { 2.0 } else { 3.0 };
    let one = |one: &Part| {
        let divided = times * part(one.parameters() * setting.gathered, shards);
        divided + all_reduce(own(one, shards) * setting.element, setting.ranks / shards)
    };
    parts.iter().map(one).sum()
}
