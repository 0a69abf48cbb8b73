//! Forward of inputs of any shape through all stages, one after the other.

use candle_core::Tensor;
use comm::broadcast_tensors;
use ops::Documents;
use strategy::all_agree_with;

use super::Pipeline;
use crate::groups::peer_failed;
use crate::{Error, Result};

impl Pipeline {
    /// Runs the model on an input of any shape that its modules accept, forward only and in evaluation mode, and returns the
    /// output on every rank along the pipeline. Every rank must call it, with the same input. `last` is applied to the output
    /// on the last stage's rank before it is broadcast, e.g. to take a part of it. For packed rows call it in a scope of their
    /// [`Documents`](ops::Documents), on every rank.
    ///
    /// # Cost
    /// Stages compute one after the other, and the output of each is broadcast.
    ///
    /// # Errors
    /// Errors of a stage or `last`; [`Error::PeerFailed`] if another rank failed in this way. The pipeline is unusable
    /// afterwards.
    pub fn forward(
        &mut self,
        input: &Tensor,
        last: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        if let Some(first) = &self.failed {
            return Err(first.clone());
        }
        let output = self.try_forward(input, &last);
        self.close_if_failed(&output);
        output
    }

    fn try_forward(
        &self,
        input: &Tensor,
        last: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        // Not every rank has attention, which asks for them.
        let _ = Documents::current();
        let (pp, owners) = (&*self.groups.pp, &self.schedule.table().owners);
        let mut x = input.clone();
        for (number, owner) in owners.iter().enumerate() {
            let own = match self.stages.iter().find(|stage| stage.number == number) {
                None => Ok(None),
                Some(stage) => {
                    let output = stage.forward(&x, false).and_then(|output| {
                        let output = if number + 1 == owners.len() { last(&output)? } else { output };
                        output.detach().contiguous().map(Some)
                    });
                    output.map_err(Error::during("forward"))
                }
            };
            let own = all_agree_with([pp], own, peer_failed)?;
            let own = own.into_iter().map(|output| (String::new(), output)).collect();
            let sent = broadcast_tensors(pp, own, *owner)?;
            let Some((_, output)) = sent.into_iter().next() else {
                return Err(Error::BadTable { reason: format!("stage {number} is nobody's") });
            };
            x = output.to_device(&self.device).map_err(Error::during("forward"))?;
        }
        Ok(x)
    }
}
