//! The groups of a layout with `far`.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use comm::{Communicator, Mesh, Operation, broadcast_object};

use super::micro_batches::sum;
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
    /// Tells this run from others, the same on all ranks.
    pub(crate) run: u64,
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
        // Of the time to the nanosecond: runs that go on from one another begin at different times.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let run = broadcast_object(&*world, &now, 0)?;
        Ok(Some(Self { world, group, across, run }))
    }

    /// Number of this rank's group, from 0.
    pub fn number(&self) -> usize {
        self.across.rank()
    }

    /// Number of groups.
    pub fn count(&self) -> usize {
        self.across.world_size()
    }

    /// Whether something is so in all groups. Call on every rank.
    pub(crate) fn all(&self, own: bool) -> Result<bool> {
        Ok(sum(&*self.world, f64::from(u8::from(!own)))? == 0.0)
    }

    /// Waits until all groups have come so far: before a checkpoint, until all have written the one before. Of the last two that a group keeps,
    /// every other then has one, too.
    pub(crate) fn wait_for_all(&self) -> Result<()> {
        Ok(self.world.run(Operation::Barrier)?)
    }
}
