//! Rebuilding buckets between steps: in the order in which gradients arrive, and with the measured size.

use std::time::Duration;

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation};

use super::{Reducer, State};
use crate::bucket_plan::{self, Plan};
use crate::search::Search;
use crate::{Result, lock};

impl Reducer {
    /// Called after each step. `time` is the duration of the step on this rank; `None` if it had no loss.
    pub(super) fn rebuild(&self, time: Option<Duration>) -> Result<()> {
        let state = &mut *lock(&self.state);
        if self.comm().world_size() == 1 {
            return Ok(());
        }
        if !std::mem::replace(&mut state.rebuilt, true) {
            return self.reorder(state);
        }
        let Some(mut search) = state.search.take() else { return Ok(()) };
        let is_next = search.note(time);
        if is_next && search.is_over() {
            let (bytes, plan) = search.choose(self.comm())?;
            state.bucket_bytes = bytes;
            state.buckets = state.buckets.replanned(plan);
            return Ok(());
        }
        if is_next {
            state.buckets = state.buckets.replanned(search.plan());
        }
        state.search = Some(search);
        Ok(())
    }

    /// Gives the parameters of a group the order among each other that they have on its first rank.
    fn take_order_of_first(
        &self,
        order: &mut [usize],
        comm: &dyn Communicator,
        indices: &[usize],
    ) -> Result<()> {
        let (count, is_of) = (indices.len(), |index: &usize| indices.binary_search(index).ok());
        let mine: Vec<i64> = order.iter().filter_map(is_of).map(|place| place as i64).collect();
        let tensor = Tensor::from_vec(mine, count, &Device::Cpu)?;
        comm.run(Operation::Broadcast { tensor: tensor.clone(), root: 0 })?;
        let of_first = tensor.to_vec1::<i64>()?.into_iter().filter_map(|place| usize::try_from(place).ok());
        let mut next = bucket_plan::complete(of_first, count).into_iter().map(|place| indices[place]);
        let own = order.iter_mut().filter(|index| is_of(index).is_some());
        own.zip(next.by_ref()).for_each(|(own, index)| *own = index);
        Ok(())
    }

    /// After the first step: refills the buckets in the order in which gradients arrived on the first rank of each group.
    fn reorder(&self, state: &mut State) -> Result<()> {
        let (bytes, first_bytes) = (self.config.bucket_bytes, self.config.first_bytes());
        if self.has_one_bucket(state) && !self.config.tune_bucket_bytes {
            return Ok(());
        }
        let mut order = bucket_plan::complete(state.buckets.arrived.iter().copied(), self.items.len());
        for (comm, indices) in self.groups() {
            self.take_order_of_first(&mut order, &**comm, &indices)?;
        }
        if self.config.tune_bucket_bytes {
            state.search = Search::new(&self.items, &order, first_bytes, bytes);
        }
        let plan = match &state.search {
            Some(search) => search.plan(),
            None => Plan::new(&self.items, &order, first_bytes, bytes),
        };
        state.buckets = state.buckets.replanned(plan);
        Ok(())
    }
}
