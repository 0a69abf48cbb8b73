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

    /// The group has changed: this process is that rank now. The first one prints.
    fn regrouped(&mut self, rank: usize) {
        let _ = rank;
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
    /// The same, where it has been read.
    pub(super) value: Option<f32>,
    pub(super) say: Say<'a>,
}

impl Step<'_> {
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
