//! Observers of a training run: printing, averaging losses, and reacting to epochs.

use std::fmt::Arguments;

use candle_core::Tensor;
use girandole::trainer::ObserverState;
use serde_json::Value;

use crate::console::say;
use crate::error::Result;

/// Prints a line on standard output.
pub(super) type Say<'a> = &'a dyn Fn(Arguments<'_>) -> Result<()>;

/// Called at every epoch and step, on each rank; `()` ignores all calls.
///
/// ```
/// use cli::error::Result;
/// use cli::trainer::{Observer, Step};
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
    /// Called when an epoch begins, or continues after a resume: then its `batch` is not 0.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        let _ = epoch;
        Ok(())
    }

    /// Called after a step.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        let _ = step;
        Ok(())
    }

    /// Called when an epoch has ended.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn epoch_ends(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        let _ = epoch;
        Ok(())
    }

    /// Returns this observer's state for a checkpoint, such as a running loss. Floats that must be restored exactly
    /// are best stored as their bits ([`f64::to_bits`]). Called on the rank that reports.
    ///
    /// # Errors
    /// Whatever ends the run.
    fn state(&mut self) -> Result<ObserverState> {
        Ok(ObserverState::default())
    }

    /// Restores what [`state`](Self::state) returned after so many steps, on every rank.
    ///
    /// # Errors
    /// The state of another observer.
    fn load_state(&mut self, steps: usize, state: ObserverState) -> Result<()> {
        let _ = (steps, state);
        Ok(())
    }
}

impl Observer for () {}

/// Calls the function after each step, with its loss, on the rank that prints.
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
    /// Batches in the sum; another run before a resume may have had another `every`.
    count: usize,
    line: F,
}

impl<F: Fn(usize, usize, f64) -> String> Means<F> {
    /// `line` formats epoch and batch, counted from 1, and the mean loss.
    pub fn new(every: usize, line: F) -> Self {
        Self { every, sum: 0.0, count: 0, line }
    }
}

impl<F: Fn(usize, usize, f64) -> String> Observer for Means<F> {
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        if epoch.batch == 0 {
            (self.sum, self.count) = (0.0, 0);
        }
        Ok(())
    }

    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        let Some(loss) = step.value else { return Ok(()) };
        self.sum += f64::from(loss);
        self.count += 1;
        let (epoch, batch) = (step.epoch + 1, step.batch + 1);
        if !batch.is_multiple_of(self.every) {
            return Ok(());
        }
        let mean = std::mem::take(&mut self.sum) / std::mem::take(&mut self.count) as f64;
        step.say(format_args!("{}", (self.line)(epoch, batch, mean)))
    }

    fn state(&mut self) -> Result<ObserverState> {
        let values = serde_json::json!([self.sum.to_bits(), self.count]);
        Ok(ObserverState { values, ..ObserverState::default() })
    }

    fn load_state(&mut self, _: usize, state: ObserverState) -> Result<()> {
        let number = |place: usize| state.values.get(place).and_then(Value::as_u64).unwrap_or_default();
        (self.sum, self.count) = (f64::from_bits(number(0)), number(1) as usize);
        Ok(())
    }
}

/// An epoch that begins or ends.
#[derive(Clone, Copy)]
pub struct Epoch<'a> {
    /// Index of the epoch, from 0.
    pub epoch: usize,
    /// The next batch; not 0 if the epoch continues after a resume.
    pub batch: usize,
    /// Samples in the next batch, on this rank.
    pub batch_size: usize,
    /// Batches of the whole epoch, on this rank.
    pub steps: usize,
    pub(super) say: Say<'a>,
}

impl Epoch<'_> {
    /// Prints a line on standard output, with the progress bar hidden meanwhile.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn say(&self, line: Arguments<'_>) -> Result<()> {
        (self.say)(line)
    }
}

/// A step that has been taken.
#[derive(Clone, Copy)]
pub struct Step<'a> {
    /// The epoch, from 0.
    pub epoch: usize,
    /// The batch of the epoch, from 0.
    pub batch: usize,
    /// The loss of this rank's batch.
    pub tensor: &'a Tensor,
    /// The value of the loss, if it has been read from the device: on a rank with a log.
    pub(super) value: Option<f32>,
    pub(super) say: Say<'a>,
}

impl<'a> Step<'a> {
    /// Returns a step without a log.
    pub(super) fn new(epoch: usize, batch: usize, tensor: &'a Tensor) -> Self {
        Self { epoch, batch, tensor, value: None, say: &say }
    }

    /// Returns the loss on a rank with a log; `None` on the others.
    pub fn value(&self) -> Option<f32> {
        self.value
    }

    /// Returns the loss of this rank's batch. On an accelerator this waits for its computation.
    ///
    /// # Errors
    /// candle's error, if the loss is not a single f32.
    pub fn loss(&self) -> Result<f32> {
        Ok(self.value.map_or_else(|| self.tensor.to_scalar(), Ok)?)
    }

    /// Prints a line on standard output, with the progress bar hidden meanwhile.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn say(&self, line: Arguments<'_>) -> Result<()> {
        (self.say)(line)
    }
}
