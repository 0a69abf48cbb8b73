//! Stages that compute one input after the other, of any length.

use candle_core::Tensor;
use training::build::Model;

use super::stages::Stages;
use super::{Kind, Parallel};
use crate::Result;

/// The stages of a pipeline, as they are until the next step: see [`Parallel::stages`].
pub struct StagesForward<'a>(&'a mut Stages);

impl<M: Model> Parallel<M> {
    /// The stages of a pipeline, to compute with as on one rank, where [`model`](Parallel::model) has none; none without `pp`. To be called on
    /// every rank.
    ///
    /// # Cost
    /// With `shard`, what an optimizer has changed is gathered.
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
    /// What the model gives for an input, forward alone: the same on every rank. To be called on every rank with the same input. `last` is done
    /// with the output where the last stage is, before all get it: it may take the part that is needed.
    ///
    /// # Cost
    /// Stages compute one after the other; what each gives is broadcast along `pp`.
    ///
    /// # Errors
    /// What a stage fails with, on every rank; failures of communication. No step can follow then.
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
