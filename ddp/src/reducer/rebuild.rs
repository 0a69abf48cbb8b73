//! Rebuilding buckets between steps: in the order in which gradients arrive, and with the measured size.

use std::time::Duration;

use candle_core::{Device, Tensor};
use comm::Operation;

use super::{Reducer, State};
use crate::plan::{self, Plan};
use crate::search::Search;
use crate::{Result, lock};

impl Reducer {
    /// Called after each step. `time` is the duration of the step on this rank; `None` if it had no loss.
    pub(super) fn rebuild(&self, time: Option<Duration>) -> Result<()> {
        let state = &mut *lock(&self.state);
        if self.comm.world_size() == 1 {
            return Ok(());
        }
        if !std::mem::replace(&mut state.rebuilt, true) {
            return self.reorder(state);
        }
        let Some(mut search) = state.search.take() else { return Ok(()) };
        let is_next = search.note(time);
        if is_next && search.is_over() {
            let (bytes, plan) = search.choose(&*self.comm)?;
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

    /// After the first step: refills the buckets in the order in which gradients arrived on rank 0.
    fn reorder(&self, state: &mut State) -> Result<()> {
        let (bytes, first_bytes) = (self.config.bucket_bytes, self.config.first_bytes());
        if state.buckets.plan.buckets.len() < 2 && !self.config.tune_bucket_bytes {
            return Ok(());
        }
        let count = self.items.len();
        let mine = plan::complete(state.buckets.arrived.iter().copied(), count);
        let tensor = Tensor::from_vec(mine.iter().map(|&index| index as i64).collect(), count, &Device::Cpu)?;
        self.comm.run(Operation::Broadcast { tensor: tensor.clone(), root: 0 })?;
        let order = tensor.to_vec1::<i64>()?.into_iter().filter_map(|index| usize::try_from(index).ok());
        let order = plan::complete(order, count);
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
