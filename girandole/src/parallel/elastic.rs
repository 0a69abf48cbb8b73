//! A model whose group has lost ranks: it continues in another group, in a layout for fewer ranks.

use std::sync::Arc;

use candle_core::Tensor;
use comm::Communicator;
use training::build::Model;

use super::axes::Axes;
use super::far_groups::FarGroups;
use super::{Kind, Parallel, ParallelConfig};
use crate::{Error, Layout, Result};

impl<M: Model> Parallel<M> {
    /// Whether every rank has a whole copy of the model.
    pub(crate) fn is_copied(&self) -> bool {
        matches!(self.model, Kind::Copies(_)) && self.layout == Layout::copies(self.layout.dp)
    }

    /// Continues with copies of the model in another group, such as the result of
    /// [`shrink`](comm::ElasticGroup::shrink), also after a failure. The new layout is one copy for each rank. Parameters
    /// are not changed, and must be equal on all ranks. Call on every rank of the group.
    ///
    /// # Cost
    /// The cost of [`ddp::Ddp::regroup`], and one group for each axis.
    ///
    /// # Errors
    /// A layout in which a rank has only a part of the model; failures of communication.
    pub fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()> {
        let (Kind::Copies(ddp), 1, 1) = (&mut self.model, self.layout.cp, self.layout.ep) else {
            let help = "only copies (dp) continue in place; a Trainer with fewest_ranks moves parts to the ranks that are left";
            return Err(Error::invalid("the layout of a model that goes on", self.layout, help));
        };
        let layout = Layout::copies(comm.world_size());
        let axes = Axes::new(&layout, comm, false, self.config.balance.is_some())?;
        ddp.regroup(axes.averaged.clone())?;
        (self.layout, self.axes, self.failed) = (layout, axes, None);
        Ok(())
    }

    /// Builds the model again in other groups of a layout with `far`. Trained parameters have any values. Call on every rank of this one's
    /// group.
    pub(crate) fn rebuilt_in(&self, far: FarGroups) -> Result<Self> {
        let own = self.rebuilt(far.group.clone(), &self.layout.of_group())?;
        Ok(Self { layout: Layout { far: far.count(), ..self.layout }, far: Some(far), ..own })
    }

    /// Builds the model again in another group and layout. Trained parameters have any values. Call on every rank of the
    /// group.
    pub(crate) fn rebuilt(&self, comm: Arc<dyn Communicator>, layout: &Layout) -> Result<Self> {
        let of_example = |example: &Tensor| -> Result<Tensor> {
            let mut dims = example.dims().to_vec();
            if let Some(rows) = dims.first_mut() {
                *rows = (*rows * self.layout.of_group().data_ranks() / layout.data_ranks()).max(1);
            }
            Ok(Tensor::zeros(dims, example.dtype(), example.device())?)
        };
        // With `cp`, this rank's example is a part of one; the first batch is the next.
        let example = self.config.example.as_ref().filter(|_| layout.cp == 1).map(of_example).transpose()?;
        (self.remake)(comm, layout, &ParallelConfig { example, ..self.config.clone() })
    }
}
