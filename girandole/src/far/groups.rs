//! The groups of a layout with `far`, and what they exchange.

use std::sync::Arc;

use candle_core::Tensor;
use comm::{Communicator, Mesh, Operation, ReduceOp};

use super::FarPrecision;
use super::quantized::{BLOCK, Quantized};
use crate::{Layout, Result};

/// The groups of ranks that train on their own.
#[derive(Debug, Clone)]
pub struct FarGroups {
    /// All ranks of the job.
    pub(crate) world: Arc<dyn Communicator>,
    /// The ranks of this one's group.
    pub(crate) group: Arc<dyn Communicator>,
    /// The ranks with the same place in each group, in the order of the groups.
    pub(crate) across: Arc<dyn Communicator>,
}

impl FarGroups {
    /// Divides the ranks of a layout; `None` if it has no `far`. Call on every rank.
    pub(crate) fn new(world: Arc<dyn Communicator>, layout: &Layout) -> Result<Option<Self>> {
        if layout.far == 1 {
            return Ok(None);
        }
        layout.check(world.world_size())?;
        let mesh = Mesh::new(world.clone(), &[("far", layout.far), ("group", layout.of_group().ranks())])?;
        let (group, across) = (mesh.axis("group")?.clone(), mesh.axis("far")?.clone());
        Ok(Some(Self { world, group, across }))
    }

    /// Number of this rank's group, from 0.
    pub fn number(&self) -> usize {
        self.across.rank()
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.across.world_size()
    }

    /// Waits until all groups have come so far. Before a checkpoint: one of which each group has its own is then always complete.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        Ok(self.world.run(Operation::Barrier)?)
    }

    /// Returns the sum of the groups' tensors, the same to the bit on each, and what of this group's own it has not. Each of
    /// `copies` gives the same tensor, and sends a part of it.
    pub(super) fn sum(
        &self,
        own: &Tensor,
        copies: &dyn Communicator,
        precision: FarPrecision,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let len = own.elem_count();
        // Blocks are quantized by themselves.
        let part = len.div_ceil(copies.world_size()).next_multiple_of(BLOCK);
        let whole = own.pad_with_zeros(0, 0, part * copies.world_size() - len)?;
        let begin = part * copies.rank();
        let (sum, error) = match precision.bits() {
            None => {
                let sum = whole.narrow(0, begin, part)?.copy()?;
                self.across.run(Operation::AllReduce { tensor: sum.clone(), op: ReduceOp::Sum })?;
                (sum, None)
            }
            Some(bits) => {
                let sent = Quantized::new(&whole, bits)?;
                let error = (own - sent.values()?.narrow(0, 0, len)?)?;
                let sum = sent.blocks(begin..begin + part)?.sum_over(&*self.across)?;
                (sum, Some(error))
            }
        };
        if copies.world_size() == 1 {
            return Ok((sum.narrow(0, 0, len)?, error));
        }
        let all = whole.zeros_like()?;
        copies.run(Operation::AllGather { output: all.clone(), input: sum, counts: None })?;
        Ok((all.narrow(0, 0, len)?, error))
    }
}
