//! The groups of a layout with `far`.

use std::sync::Arc;

use comm::{Communicator, Mesh, Operation};

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
    pub(super) fn new(world: Arc<dyn Communicator>, layout: &Layout) -> Result<Option<Self>> {
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
}
