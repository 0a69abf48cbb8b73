//! Late gradients: those that arrive after their bucket has been sent.
//!
//! Backward passes a parameter's hook once per graph, and the gradient is complete then. But what backward recomputes has a
//! separate graph: a parameter that is used there and elsewhere gets several gradients in one pass. The first pass shows how
//! many, and later passes wait for all of them.

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use super::{Reducer, State};
use crate::buckets::scaled;
use crate::{Error, Result, lock};

impl Reducer {
    /// Stores a gradient whose bucket has already been sent.
    pub(super) fn receive_late(&self, state: &mut State, index: usize, grad: &Tensor) -> Result<()> {
        if state.rebuilt {
            return Err(Error::LateGradient { parameter: self.gradients[index].name.clone() });
        }
        let Some(scale) = state.scale else { return Ok(()) };
        let grad = scaled(&grad.detach().contiguous()?.flatten_all()?, scale)?;
        let sum = match state.late[index].take() {
            Some(late) => (late + grad)?,
            None => grad,
        };
        state.late[index] = Some(sum);
        Ok(())
    }

    /// In the first pass, after all buckets are averaged: averages the gradients that were late on any rank, and adds them.
    pub(super) fn average_late(&self) -> Result<()> {
        let state = &mut *lock(&self.state);
        if state.rebuilt || self.has_one_bucket(state) {
            return Ok(());
        }
        self.groups().try_for_each(|(comm, indices)| self.average_late_of(state, &**comm, &indices))
    }

    /// The same for the parameters of a group.
    fn average_late_of(&self, state: &mut State, comm: &dyn Communicator, indices: &[usize]) -> Result<()> {
        let late: Vec<i64> = indices.iter().map(|index| i64::from(state.late[*index].is_some())).collect();
        let some = Tensor::zeros(comm.world_size(), DType::I64, &Device::Cpu)?;
        let input = Tensor::new(&[i64::from(late.contains(&1))], &Device::Cpu)?;
        comm.run(Operation::AllGather { output: some.clone(), input, counts: None })?;
        if !some.to_vec1::<i64>()?.contains(&1) {
            return Ok(());
        }
        let which = Tensor::from_vec(late, indices.len(), &Device::Cpu)?;
        comm.run(Operation::AllReduce { tensor: which.clone(), op: ReduceOp::Max })?;
        let factor = state.weights.factor()?;
        for (&index, _) in indices.iter().zip(which.to_vec1::<i64>()?).filter(|(_, late)| *late == 1) {
            let own = state.late[index].take().map_or_else(|| self.gradients[index].zeros(), Ok)?;
            // Copied to new memory, since `own` may share memory with a view that the user holds.
            let tensor = own.affine(factor, 0.0)?;
            comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Avg })?;
            state.buckets.add(index, &tensor)?;
        }
        Ok(())
    }
}
