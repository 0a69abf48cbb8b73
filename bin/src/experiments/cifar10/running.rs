//! The loss that the handbook prints: the mean of the last so many batches.

use serde_json::Value;

use crate::error::Result;
use crate::python::Fixed;
use crate::trainer::{Epoch, Observer, Step};

/// Adds up losses on rank 0, and prints their means.
pub(super) struct RunningLoss {
    /// Batches of a mean; `None` on the ranks that do not print.
    pub(super) every: Option<usize>,
    sum: f64,
}

impl RunningLoss {
    pub(super) fn new(every: Option<usize>) -> Self {
        Self { every, sum: 0.0 }
    }
}

impl Observer for RunningLoss {
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        if epoch.batch == 0 {
            self.sum = 0.0;
        }
        Ok(())
    }

    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        let Some(every) = self.every else { return Ok(()) };
        self.sum += f64::from(step.loss()?);
        let (epoch, batch) = (step.epoch + 1, step.batch + 1);
        if batch.is_multiple_of(every) {
            let mean = Fixed::<3>(self.sum / every as f64);
            self.sum = 0.0;
            step.say(format_args!("[{epoch}, {batch:5}] loss: {mean}"))?;
        }
        Ok(())
    }

    fn state(&self) -> Value {
        self.sum.to_bits().into()
    }

    fn load_state(&mut self, state: &Value) {
        self.sum = f64::from_bits(state.as_u64().unwrap_or_default());
    }
}
