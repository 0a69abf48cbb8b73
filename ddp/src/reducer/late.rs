//! Gradients that come after their bucket has gone.
//!
//! A parameter's hook is passed once in a graph, and its gradient is complete then. But what backward computes again has a graph of
//! its own: a parameter that is used there, and elsewhere, gets several gradients in one pass. The first pass shows how many, and later
//! ones wait for all of them.

use candle_core::{DType, Device, Tensor};
use comm::{Operation, ReduceOp};

use super::{Reducer, State};
use crate::buckets::scaled;
use crate::{Error, Result, lock};

impl Reducer {
    /// Keeps a gradient whose bucket has gone.
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

    /// In the first pass, when all buckets are averaged: averages what came late on any rank, and adds it.
    pub(super) fn average_late(&self) -> Result<()> {
        let state = &mut *lock(&self.state);
        if state.rebuilt || state.buckets.plan.buckets.len() < 2 {
            return Ok(());
        }
        let count = self.gradients.len();
        let late: Vec<i64> = state.late.iter().map(|late| i64::from(late.is_some())).collect();
        let some = Tensor::zeros(self.comm.world_size(), DType::I64, &Device::Cpu)?;
        let input = Tensor::new(&[i64::from(late.contains(&1))], &Device::Cpu)?;
        self.comm.run(Operation::AllGather { output: some.clone(), input, counts: None })?;
        if !some.to_vec1::<i64>()?.contains(&1) {
            return Ok(());
        }
        let which = Tensor::from_vec(late, count, &Device::Cpu)?;
        self.comm.run(Operation::AllReduce { tensor: which.clone(), op: ReduceOp::Max })?;
        let factor = state.weights.factor()?;
        for (index, _) in which.to_vec1::<i64>()?.iter().enumerate().filter(|(_, late)| **late == 1) {
            let own = state.late[index].take().map_or_else(|| self.gradients[index].zeros(), Ok)?;
            // In memory of its own, since a view of the user's may lie in what came.
            let tensor = own.affine(factor, 0.0)?;
            self.comm.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Avg })?;
            state.buckets.add(index, &tensor)?;
        }
        Ok(())
    }
}
