//! Elastic data parallelism: copies of a model continue in another group.

use std::sync::Arc;

use comm::Communicator;
use training::build::Model;

use super::{Kind, Parallel};
use crate::{Error, Layout, Result};

impl<M: Model> Parallel<M> {
    /// Whether training can continue when ranks are lost: every rank has a whole copy, and there are several.
    pub fn is_elastic(&self) -> bool {
        matches!(self.model, Kind::Copies(_)) && self.layout.dp == self.layout.ranks()
    }

    /// Refuses a layout in which a rank holds the only copy of a part of the model, or of all of it: it would be lost
    /// with the rank.
    pub(crate) fn check_elastic(&self) -> Result<()> {
        if self.is_elastic() {
            return Ok(());
        }
        let help = "a rank's part is lost with it: only a layout of copies (dp) can go on with other ranks";
        Err(Error::invalid("the layout of a model that goes on", self.layout, help))
    }

    /// Continues with the ranks of another group, such as the result of [`shrink`](comm::ElasticGroup::shrink), also
    /// after a failure. The new layout is one copy for each rank. Parameters are not changed, and must be equal on all
    /// ranks. Call on every rank of the group.
    ///
    /// # Cost
    /// The cost of [`ddp::Ddp::regroup`], and one group for each axis.
    ///
    /// # Errors
    /// A layout in which a rank has only a part of the model; failures of communication.
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
