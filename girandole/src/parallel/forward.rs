//! Forward pass through pipeline stages for single inputs of any length.

use candle_core::Tensor;
use training::build::Model;

use super::stages::Stages;
use super::{Kind, Parallel};
use crate::Result;

/// The stages of a pipeline with their current parameters, until the next step: see [`Parallel::stages`].
pub struct StagesForward<'a>(&'a mut Stages);

impl<M: Model> Parallel<M> {
    /// Returns the stages of a pipeline, for forward passes on all ranks together, in place of
    /// [`model`](Parallel::model); `None` without `pp`. Call on every rank.
    ///
    /// # Cost
    /// With `shard`, the parameters that an optimizer has changed are gathered.
    ///
    /// # Errors
    /// The cause, if an earlier call failed; failures of communication.
    pub fn stages(&mut self) -> Result<Option<StagesForward<'_>>> {
        self.check()?;
        match &mut self.model {
            Kind::Stages(stages) => {
                stages.gather()?;
                Ok(Some(StagesForward(stages)))
            }
            _ => Ok(None),
        }
    }
}

impl StagesForward<'_> {
    /// Computes the model's output for an input, without backward. Returns the same on every rank. Call on every rank
    /// with the same input. `last` is applied to the output on the last stage before it is sent to all ranks: it may
    /// select the part that is needed.
    ///
    /// # Cost
    /// Stages compute one after the other; the output of each is broadcast along `pp`.
    ///
    /// # Errors
    /// Errors of a stage, on every rank; failures of communication. No step is possible afterwards.
    pub fn forward(
        &mut self,
        input: &Tensor,
        last: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        self.0.forward(input, last)
    }
}

impl std::fmt::Debug for StagesForward<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StagesForward")
    }
}
