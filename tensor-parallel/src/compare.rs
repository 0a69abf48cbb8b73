//! The check that replicated parameters are equal.

use candle_core::Tensor;
use strategy::{Replicas, check_replicas};

use crate::{Result, Split, TensorParallel};

impl<M> TensorParallel<M> {
    /// Compares parameters bit for bit: those that every rank holds whole over all ranks, and parts of divided ones over the
    /// data-parallel replicas. Must be called on every rank, at the same point: occasionally during a long training, or when
    /// debugging.
    ///
    /// # Cost
    /// One pass over the parameters, and all-gathers of a few bytes. Only if they differ: 8 bytes per parameter, then a
    /// broadcast of one parameter.
    ///
    /// # Errors
    /// [`strategy::Error::ParametersDiffer`], the same on every rank, names the first parameter that differs, the ranks, the element
    /// (within their part) and both values. Training can continue after it. Failures of communication.
    pub fn check_parameters(&self) -> Result<()> {
        self.check_failed()?;
        let of = |is_whole: bool| -> Vec<(&str, &Tensor)> {
            let same = self.parameters().iter().filter(|p| (p.split() == Split::Whole) == is_whole);
            same.map(|parameter| (parameter.name(), parameter.var().as_tensor())).collect()
        };
        let held = [
            Replicas { among: Some(self.world()), tensors: of(true) },
            Replicas { among: self.dp().map(|dp| &**dp), tensors: of(false) },
        ];
        Ok(check_replicas(&[self.world()], &held)?)
    }
}
