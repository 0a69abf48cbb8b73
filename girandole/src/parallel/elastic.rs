//! Copies that go on in another group.

use std::sync::Arc;

use comm::Communicator;
use training::build::Model;

use super::{Kind, Parallel};
use crate::{Error, Layout, Result};

impl<M: Model> Parallel<M> {
    /// Whether it can go on when ranks are lost: every rank has all of it, and there are others.
    pub fn is_elastic(&self) -> bool {
        matches!(self.model, Kind::Copies(_)) && self.layout.dp == self.layout.ranks()
    }

    /// Refuses a layout in which a rank has a part of the model, or all that there is: both are lost with it.
    pub(crate) fn check_elastic(&self) -> Result<()> {
        if self.is_elastic() {
            return Ok(());
        }
        let help = "a rank's part is lost with it: only a layout of copies (dp) can go on with other ranks";
        Err(Error::invalid("the layout of a model that goes on", self.layout, help))
    }

    /// Goes on with the ranks of another group, as one of [`shrink`](comm::ElasticGroup::shrink)'s, after a failure as well: as many
    /// copies as it has ranks. Parameters stay as they are, and must be equal on all ranks. To be called on every rank of the group.
    ///
    /// # Cost
    /// That of [`ddp::Ddp::regroup`], and a group for each axis.
    ///
    /// # Errors
    /// A layout in which a rank has a part of the model; failures of communication.
    pub fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()> {
        self.check_elastic()?;
        let layout = Layout::copies(comm.world_size());
        let mesh = layout.mesh(comm)?;
        let data = mesh.plane(&["dp", "shard"])?;
        let Kind::Copies(ddp) = &mut self.model else { return Ok(()) };
        ddp.regroup(data.clone())?;
        (self.layout, self.mesh, self.data, self.failed) = (layout, mesh, data, None);
        Ok(())
    }
}
