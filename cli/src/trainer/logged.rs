//! The log of a run as an observer: metrics, losses for a report, and the progress bar.

use std::fmt::Arguments;

use candle_core::Tensor;
use girandole::trainer::ObserverState;
use report::RunSeries;
use serde_json::{Value, json};

use crate::console;
use crate::error::Result;
use crate::run_log::RunLog;

use super::{Epoch, Observer, Position, Step};

/// An observer that logs what it is told, on a rank that has a log, and passes it on to another one.
pub struct Logged<'a, 'l> {
    pub(super) log: Option<RunLog<'l>>,
    observer: &'a mut dyn Observer,
}

impl<'a, 'l> Logged<'a, 'l> {
    /// Adds a log to an observer.
    pub fn new(log: Option<RunLog<'l>>, observer: &'a mut dyn Observer) -> Self {
        Self { log, observer }
    }

    /// Ends the log, and returns what it has kept for a report.
    pub fn finish(self) -> RunSeries {
        self.log.map(RunLog::finish).unwrap_or_default()
    }

    /// The same without the log.
    pub(super) fn without_log(&mut self) -> Logged<'_, '_> {
        Logged { log: None, observer: self.observer }
    }

    /// The log, if this rank does not print.
    pub(super) fn muted(&mut self) -> Option<&mut RunLog<'l>> {
        self.log.as_mut().filter(|log| log.is_muted())
    }

    /// Begins to print in place of a lost rank, and logs the last step, if it is given and the lost rank had not.
    pub(super) fn take_over(&mut self, next: Position, last: Option<(Position, Tensor)>) -> Result<()> {
        let Some(log) = self.muted() else { return Ok(()) };
        log.take_over(next.step, (next.epoch, next.batch))?;
        let Some((Position { epoch, batch, .. }, tensor)) = last else { return Ok(()) };
        if log.has(epoch, batch)? == Some(true) {
            return Ok(());
        }
        let loss = tensor.to_scalar::<f32>()?;
        log.cut(epoch, batch)?;
        log.write_again((epoch, batch), loss, None)?;
        self.pass_on(&Step::new(epoch, batch, &tensor), Some(loss))
    }

    fn pass_on(&mut self, step: &Step<'_>, value: Option<f32>) -> Result<()> {
        self.observer.stepped(&Step { value, say: &line_printer(self.log.as_ref()), ..*step })
    }
}

impl Observer for Logged<'_, '_> {
    fn epoch_begins(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        self.observer.epoch_begins(&Epoch { say: &line_printer(self.log.as_ref()), ..*epoch })
    }

    fn stepped(&mut self, step: &Step<'_>) -> Result<()> {
        let mut value = None;
        if let Some(log) = &mut self.log {
            let loss = step.tensor.to_scalar()?;
            log.step(step.epoch, step.batch, loss)?;
            value = Some(loss);
        }
        self.pass_on(step, value)
    }

    fn epoch_ends(&mut self, epoch: &Epoch<'_>) -> Result<()> {
        self.observer.epoch_ends(&Epoch { say: &line_printer(self.log.as_ref()), ..*epoch })
    }

    fn state(&mut self) -> Result<ObserverState> {
        let log = match &mut self.log {
            Some(log) => {
                // The metrics must include all steps that will not be repeated.
                log.flush()?;
                log.saved()?
            }
            None => ObserverState::default(),
        };
        let ObserverState { values, tensors } = self.observer.state()?;
        let values = json!({ "log": log.values, "observer": values });
        Ok(ObserverState { values, tensors: log.tensors.into_iter().chain(tensors).collect() })
    }

    fn load_state(&mut self, steps: usize, state: ObserverState) -> Result<()> {
        let ObserverState { mut values, tensors } = state;
        let mut of = |name: &str| values.get_mut(name).map(Value::take).unwrap_or_default();
        let [log, observer] = ["log", "observer"].map(&mut of);
        self.observer.load_state(steps, ObserverState { values: observer, tensors: tensors.clone() })?;
        self.log.as_mut().map_or(Ok(()), |own| own.restore(steps, ObserverState { values: log, tensors }))
    }
}

/// Returns the function that prints lines: through the log, which hides the progress bar meanwhile, if there is one.
fn line_printer<'a>(log: Option<&'a RunLog<'_>>) -> impl Fn(Arguments<'_>) -> Result<()> + 'a {
    move |line| match log {
        Some(log) => log.say(line),
        None => console::say(line),
    }
}
