//! The means that the from-scratch tutorial prints.

use crate::error::Result;
use crate::python::Fixed;
use crate::trainer::{Epoch, Observer, Step};

/// The tutorial prints the mean loss of this many batches.
const PRINT_EVERY: usize = 100;

/// Adds up losses where they are printed.
pub(super) struct Means {
    pub(super) prints: bool,
    pub(super) sum: f64,
}

impl Observer for Means {
    fn epoch_begins(&mut self, _: &Epoch<'_>) -> Result<()> {
        self.sum = 0.0;
        Ok(())
    }

    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        if !self.prints {
            return Ok(());
        }
        self.sum += f64::from(step.loss()?);
        let (epoch, batch) = (step.epoch + 1, step.batch + 1);
        if batch.is_multiple_of(PRINT_EVERY) {
            let mean = Fixed::<5>(std::mem::take(&mut self.sum) / PRINT_EVERY as f64);
            step.say(format_args!("[{epoch}, {batch}] loss: {mean}"))?;
        }
        Ok(())
    }
}
