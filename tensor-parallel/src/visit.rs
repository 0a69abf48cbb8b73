//! Visiting whole parameters, one at a time.

use candle_core::Tensor;
use comm::{Communicator, Operation};

use crate::checkpoint::all_agree;
use crate::{Parameter, Result, Split, TensorParallel};

impl<M> TensorParallel<M> {
    /// Passes each whole parameter and its name to `visit` on the model's first rank, in order of construction: for writing
    /// file formats other than that of [`save_full`](Self::save_full). Must be called on every rank.
    ///
    /// # Memory
    /// On the first rank, one parameter at a time.
    ///
    /// # Errors
    /// On every rank, if `visit` fails on one; the first cause, if an earlier backward failed; failures of communication.
    pub fn visit_full(&self, mut visit: impl FnMut(&str, Tensor) -> candle_core::Result<()>) -> Result<()> {
        self.check()?;
        let comm = &**self.context().comm();
        let is_first_copy = self.dp().is_none_or(|dp| dp.rank() == 0);
        let mut failed = None;
        for parameter in self.parameters() {
            // The other ranks send their parts in any case.
            if let (Some(whole), true, None) = (whole(comm, parameter)?, is_first_copy, &failed) {
                failed = visit(parameter.name(), whole).err();
            }
        }
        all_agree(self.world(), failed.map_or(Ok(()), |error| Err(error.into())))
    }
}

/// Gathers a parameter from all ranks on the first one; `None` on the others.
fn whole(comm: &dyn Communicator, parameter: &Parameter) -> Result<Option<Tensor>> {
    let own = parameter.var().as_detached_tensor();
    let (split, dims, ranks) = (parameter.split(), parameter.dims(), comm.world_size());
    if split == Split::Whole || ranks == 1 {
        return Ok((comm.rank() == 0).then_some(own));
    }
    if comm.rank() > 0 {
        comm.run(Operation::Send { tensor: own.force_contiguous()?, to: 0 })?;
        return Ok(None);
    }
    let mut parts = vec![own.clone()];
    for rank in 1..ranks {
        let runs = split.runs(dims, rank, ranks);
        let mut shape = own.dims().to_vec();
        // Only rows may be divided unevenly.
        if split != Split::Columns {
            shape[0] = runs.len * runs.count / shape[1..].iter().product::<usize>().max(1);
        }
        let part = Tensor::zeros(shape, own.dtype(), own.device())?;
        comm.run(Operation::Recv { tensor: part.clone(), from: rank })?;
        parts.push(part);
    }
    Ok(Some(match split {
        Split::Columns => Tensor::cat(&parts, 1)?,
        Split::Rows { groups } if groups > 1 => {
            // The parts of each group are concatenated.
            let by_group = |part: &Tensor| part.reshape((groups, part.elem_count() / groups));
            let parts = parts.iter().map(by_group).collect::<candle_core::Result<Vec<_>>>()?;
            Tensor::cat(&parts, 1)?.reshape(dims)?
        }
        _ => Tensor::cat(&parts, 0)?,
    }))
}
