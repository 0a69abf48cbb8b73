//! What a program does besides training: printing, averaging losses, looking at epochs.

use std::fmt::Arguments;

use candle_core::Tensor;
use serde_json::Value;

use crate::error::Result;

/// Prints a line on standard output.
pub(super) type Say<'a> = &'a dyn Fn(Arguments<'_>) -> Result<()>;

/// Hears of every epoch and step, on each rank; `()` does nothing with it.
///
/// ```
/// use bin::error::Result;
/// use bin::trainer::{Observer, Step};
///
/// /// Prints every tenth loss.
/// struct Printer;
///
/// impl Observer for Printer {
///     fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
///         if !step.batch.is_multiple_of(10) {
///             return Ok(());
///         }
///         let loss = step.loss()?;
///         step.say(format_args!("Epoch {}, Batch {}, Loss: {loss}", step.epoch, step.batch))
///     }
/// }
/// ```
pub trait Observer {
    /// An epoch begins, or goes on after a resume: then its `batch` is not 0.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        let _ = epoch;
        Ok(())
    }

    /// A step was taken.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// An epoch is over.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn epoch_ends(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        let _ = epoch;
        Ok(())
    }

    /// What a checkpoint is to keep of this observer: a running loss, for one. Numbers that must come back to the bit as their
    /// bits ([`f64::to_bits`]). Asked on rank 0.
    fn state(&self) -> Value {
        Value::Null
    }

    /// Goes on from what [`state`](Self::state) gave, on every rank.
    fn load_state(&mut self, state: &Value) {
        let _ = state;
    }
}

impl Observer for () {}

/// Does this after each step, with its loss, on the rank that prints.
pub struct Losses<F>(pub F);

impl<F: FnMut(&Step<'_>, f32) -> Result<()>> Observer for Losses<F> {
    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        step.value.map_or(Ok(()), |loss| (self.0)(step, loss))
    }
}

/// Prints the mean loss of every so many batches of an epoch, on the rank that prints.
pub struct Means<F> {
    every: usize,
    sum: f64,
    line: F,
}

impl<F: Fn(usize, usize, f64) -> String> Means<F> {
    /// Prints a line of epoch and batch, from 1, and mean.
    pub fn new(every: usize, line: F) -> Self {
        Self { every, sum: 0.0, line }
    }
}

impl<F: Fn(usize, usize, f64) -> String> Observer for Means<F> {
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        if epoch.batch == 0 {
            self.sum = 0.0;
        }
        Ok(())
    }

    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        let Some(loss) = step.value else { return Ok(()) };
        self.sum += f64::from(loss);
        let (epoch, batch) = (step.epoch + 1, step.batch + 1);
        if !batch.is_multiple_of(self.every) {
            return Ok(());
        }
        let mean = std::mem::take(&mut self.sum) / self.every as f64;
        step.say(format_args!("{}", (self.line)(epoch, batch, mean)))
    }

    fn state(&self) -> Value {
        self.sum.to_bits().into()
    }

    fn load_state(&mut self, state: &Value) {
        self.sum = f64::from_bits(state.as_u64().unwrap_or_default());
    }
}

/// An epoch that begins or ends.
pub struct Epoch<'a> {
    /// Which, from 0.
    pub epoch: usize,
    /// The batch that comes next; not 0 where the epoch goes on after a resume.
    pub batch: usize,
    /// Samples in the next batch, on this rank.
    pub batch_size: usize,
    /// Batches of the whole epoch, on this rank.
    pub steps: usize,
    pub(super) say: Say<'a>,
}

impl Epoch<'_> {
    /// Prints a line on standard output, with the progress bar out of its way.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn say(&self, line: Arguments<'_>) -> Result<()> {
        (self.say)(line)
    }
}

/// A step that was taken.
pub struct Step<'a> {
    /// The epoch, from 0.
    pub epoch: usize,
    /// The batch of the epoch, from 0.
    pub batch: usize,
    /// The loss of this rank's batch.
    pub tensor: &'a Tensor,
    /// The same, where it has been read: on a rank with a log.
    pub(super) value: Option<f32>,
    pub(super) say: Say<'a>,
}

impl Step<'_> {
    /// The loss, on a rank with a log: the one that prints.
    pub fn value(&self) -> Option<f32> {
        self.value
    }

    /// The loss of this rank's batch. On an accelerator this waits for it.
    ///
    /// # Errors
    /// candle's, where the loss is not one f32.
    pub fn loss(&self) -> Result<f32> {
        Ok(self.value.map_or_else(|| self.tensor.to_scalar(), Ok)?)
    }

    /// Prints a line on standard output, with the progress bar out of its way.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn say(&self, line: Arguments<'_>) -> Result<()> {
        (self.say)(line)
    }
}
