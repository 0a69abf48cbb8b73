//! Flat shards: all ranks have the whole variables, and each rank's optimizer changes a part of them. Used to shard the
//! optimizer of pipeline stages.

use std::ops::Range;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, Operation};

use crate::Result;

/// The variables of a rank's stages, and its shard of each.
pub(super) struct FlatShards {
    comm: Arc<dyn Communicator>,
    vars: Vec<Divided>,
}

struct Divided {
    name: String,
    whole: Var,
    /// Range of the shard in the flattened variable. May be empty; the shard variable then still has one element.
    range: Range<usize>,
    shard: Var,
}

impl FlatShards {
    pub(super) fn new(comm: Arc<dyn Communicator>, vars: Vec<(String, Var)>) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        let divide = |(name, whole): (String, Var)| {
            let range = range(whole.elem_count(), rank, ranks);
            let flat = whole.as_detached_tensor().flatten_all()?;
            let shard = Var::from_tensor(&part(&flat, &range)?.force_contiguous()?)?;
            Ok(Divided { name, whole, range, shard })
        };
        let vars = vars.into_iter().map(divide).collect::<Result<_>>()?;
        Ok(Self { comm, vars })
    }

    pub(super) fn named_vars(&self) -> Vec<(String, Var)> {
        self.vars.iter().map(|var| (var.name.clone(), var.shard.clone())).collect()
    }

    pub(super) fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// Returns the range of the flattened variable for each variable of [`named_vars`](Self::named_vars).
    pub(super) fn ranges(&self) -> Vec<Range<usize>> {
        self.vars.iter().map(|var| var.range.clone()).collect()
    }

    /// Returns this rank's shard of gradients that all ranks have.
    pub(super) fn of_gradients(&self, grads: &GradStore) -> Result<GradStore> {
        let mut store = ops::tape::empty()?;
        for var in &self.vars {
            let Some(gradient) = grads.get(&var.whole) else { continue };
            let own = part(&gradient.contiguous()?.flatten_all()?, &var.range)?;
            // A copy, so that the whole gradient can be freed.
            let own = own.force_contiguous()?;
            store.insert(&var.shard, if var.range.is_empty() { own.zeros_like()? } else { own });
        }
        Ok(store)
    }

    /// Gathers all variables from the shards of all ranks.
    pub(super) fn gather(&self) -> Result<()> {
        let ranks = self.comm.world_size();
        let mut works = Vec::with_capacity(self.vars.len());
        for var in &self.vars {
            // A view, so the all-gather writes into the variable.
            let output = var.whole.as_detached_tensor().flatten_all()?;
            let counts = (0..ranks).map(|rank| range(output.elem_count(), rank, ranks).len()).collect();
            let input = var.shard.as_detached_tensor().narrow(0, 0, var.range.len())?;
            works.push(self.comm.submit(Operation::AllGather { output, input, counts: Some(counts) })?);
        }
        Ok(works.into_iter().try_for_each(comm::Work::wait)?)
    }
}

/// Returns the range of `len` elements that a rank has.
fn range(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    let each = len.div_ceil(ranks);
    (rank * each).min(len)..((rank + 1) * each).min(len)
}

/// Returns a part of a flat tensor. An empty range yields one element, as variables cannot be empty.
fn part(flat: &Tensor, range: &Range<usize>) -> Result<Tensor> {
    if flat.elem_count() == 0 {
        return Ok(Tensor::zeros(1, flat.dtype(), flat.device())?);
    }
    let start = range.start.min(flat.elem_count() - 1);
    Ok(flat.narrow(0, start, range.len().max(1))?)
}
