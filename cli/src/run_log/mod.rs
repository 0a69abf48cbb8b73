//! Log of a run's losses: metrics file, report and progress bar.

mod curves;
mod saved;

use std::time::Instant;

use report::metrics::{MetricsWriter, StepDetails};
use report::{Evaluation, Quantity, RoutedTokens, RunSeries};
use serde::{Deserialize, Serialize};

use crate::console::say;
use crate::error::Result;
use crate::live_page::LivePage;
use crate::progress::Progress;

use curves::Curves;

/// Configuration of a [`RunLog`].
#[derive(Debug, Default)]
pub struct LogConfig {
    /// Name of the run, if the experiment has several. Default: `None`.
    pub run: Option<&'static str>,
    /// Whether to keep losses for a report. Default: false.
    pub keep: bool,
    /// Number of steps of the run. Default: 0.
    pub steps: usize,
    /// Prints and writes nothing, until this rank replaces the one that does. Default: false.
    pub muted: bool,
    /// Flushes each step's metrics to the file, so that none is lost if the process dies. Default: false.
    pub at_once: bool,
}

/// The part of a [`RunLog`] that is stored in a checkpoint, without the losses themselves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct LogState {
    /// Training time in seconds, as the bits of an f64.
    seconds: u64,
    steps_per_loss: usize,
    /// Sum of the losses that do not form a point yet, as the bits of an f64.
    sum: u64,
    count: usize,
    /// Number of steps before the first loss.
    #[serde(default)]
    first: usize,
}

/// The log of one run. Muted on the ranks that do not print.
#[derive(Debug)]
pub struct RunLog<'a> {
    run: Option<&'static str>,
    metrics: Option<&'a mut MetricsWriter>,
    keep: bool,
    muted: bool,
    at_once: bool,
    steps: usize,
    curves: Curves,
    page: Option<LivePage>,
    progress: Progress,
    began: Instant,
    /// Seconds of training before a resume.
    before: f64,
    /// Number of steps at the beginning whose losses were not kept.
    first: usize,
    evaluations: Vec<Evaluation>,
    /// Tokens of experts in the last step that was logged with them.
    experts: Option<RoutedTokens>,
}

impl<'a> RunLog<'a> {
    /// Starts the log of a run.
    pub fn new(config: &LogConfig, metrics: Option<&'a mut MetricsWriter>) -> Self {
        let &LogConfig { run, keep, steps, muted, at_once } = config;
        let progress = if muted { Progress::nowhere() } else { Progress::new(steps) };
        let (curves, page, began) = (Curves::default(), None, Instant::now());
        let (before, first, evaluations) = (0.0, 0, Vec::new());
        Self {
            run,
            metrics,
            keep,
            muted,
            at_once,
            steps,
            curves,
            page,
            progress,
            began,
            before,
            first,
            evaluations,
            experts: None,
        }
    }

    /// Writes this page while the run goes on, unless muted.
    #[must_use]
    pub(crate) fn with_page(self, page: Option<LivePage>) -> Self {
        Self { page, ..self }
    }

    /// Logs the loss of one step.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn step(&mut self, epoch: usize, batch: usize, loss: f32) -> Result<()> {
        self.log_step(epoch, batch, loss, None)
    }

    /// Logs the loss of one step with further details.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn step_with(&mut self, epoch: usize, batch: usize, loss: f32, details: &StepDetails) -> Result<()> {
        self.progress.speed(details.tokens_per_second);
        self.log_step(epoch, batch, loss, Some(details))
    }

    fn log_step(
        &mut self,
        epoch: usize,
        batch: usize,
        loss: f32,
        details: Option<&StepDetails>,
    ) -> Result<()> {
        if let (Some(metrics), false) = (&mut self.metrics, self.muted) {
            metrics.step(self.run, epoch, batch, loss, details)?;
            if self.at_once {
                metrics.flush()?;
            }
        }
        if self.keep {
            self.curves.push(loss, &details.map(StepDetails::quantities).unwrap_or_default());
        }
        self.progress.step();
        if self.page.as_ref().is_some_and(LivePage::is_due) {
            self.write_page();
        }
        Ok(())
    }

    /// Logs how many tokens each expert had in a step that was logged before.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn experts(&mut self, routed: RoutedTokens) -> Result<()> {
        if let (Some(metrics), false) = (&mut self.metrics, self.muted) {
            metrics.experts(self.run, &routed)?;
        }
        self.experts = Some(routed);
        Ok(())
    }

    fn write_page(&mut self) {
        let Some(mut page) = self.page.take().filter(|_| !self.muted) else { return };
        let seconds = self.before + self.began.elapsed().as_secs_f64();
        page.write(RunSeries { seconds, ..self.series() });
        self.page = Some(page);
    }

    /// Logs an evaluation. It replaces those of the same and later steps: after the loss of a rank, an evaluation may
    /// be repeated.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub fn evaluated(&mut self, evaluation: Evaluation) -> Result<()> {
        self.write_evaluation(&evaluation)?;
        self.evaluations.retain(|other| other.step < evaluation.step);
        self.evaluations.push(evaluation);
        self.write_page();
        Ok(())
    }

    fn write_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        let Some(metrics) = self.metrics.as_deref_mut().filter(|_| !self.muted) else { return Ok(()) };
        if !metrics.has_evaluation(self.run, evaluation.step)? {
            metrics.evaluation(self.run, evaluation)?;
        }
        if self.at_once { Ok(metrics.flush()?) } else { Ok(()) }
    }

    /// Starts after `steps` steps whose losses were not kept.
    fn begin_at(&mut self, steps: usize) {
        self.first = steps;
        self.progress.resume(steps);
    }

    /// Makes this rank the reporter in place of a lost one; `done` steps are complete, and the given one is next.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub(crate) fn take_over(&mut self, done: usize, (epoch, batch): (usize, usize)) -> Result<()> {
        self.muted = false;
        self.progress = Progress::new(self.steps);
        self.progress.resume(done);
        self.cut(epoch, batch)?;
        // The lost rank may not have written the last evaluation.
        match self.evaluations.last().cloned() {
            Some(last) => self.write_evaluation(&last),
            None => Ok(()),
        }
    }

    /// Checks whether the metrics file has this step; `None` if there is no metrics file.
    ///
    /// # Errors
    /// Metrics that cannot be read.
    pub fn has(&mut self, epoch: usize, batch: usize) -> Result<Option<bool>> {
        Ok(self.metrics.as_mut().map(|metrics| metrics.has(self.run, epoch, batch)).transpose()?)
    }

    /// Writes the metrics of a step that this rank has already counted.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub(crate) fn write_again(
        &mut self,
        (epoch, batch): (usize, usize),
        loss: f32,
        details: Option<&StepDetails>,
    ) -> Result<()> {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        Ok(metrics.step(self.run, epoch, batch, loss, details)?)
    }

    /// Returns the seconds of training before the run was resumed from a checkpoint.
    pub(crate) fn before(&self) -> f64 {
        self.before
    }

    /// Returns the metrics writer, on the rank that prints.
    pub(crate) fn metrics(&mut self) -> Option<&mut MetricsWriter> {
        self.metrics.as_deref_mut().filter(|_| !self.muted)
    }

    /// True for the log of a rank that does not print.
    pub(crate) fn is_muted(&self) -> bool {
        self.muted
    }

    /// Prints a line of the tutorial's output, unless muted.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn say(&self, line: std::fmt::Arguments<'_>) -> Result<()> {
        if self.muted {
            return Ok(());
        }
        self.progress.with_bar_hidden(|| say(line))
    }

    /// Flushes all metrics so far to the file.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.flush())?)
    }

    /// Returns the state and the losses for a checkpoint.
    fn state(&self) -> (LogState, &[f32]) {
        let (losses, steps_per_loss, (sum, count)) = self.curves.losses();
        let seconds = self.before + self.began.elapsed().as_secs_f64();
        let (seconds, sum, first) = (seconds.to_bits(), sum.to_bits(), self.first);
        (LogState { seconds, steps_per_loss, sum, count, first }, losses)
    }

    /// Restores what [`state`](Self::state) returned, after `steps` steps.
    fn resume(&mut self, steps: usize, state: LogState, losses: Vec<f32>) {
        let LogState { seconds, steps_per_loss, sum, count, first } = state;
        (self.before, self.first) = (f64::from_bits(seconds), first);
        self.progress.resume(steps);
        if !self.keep {
            return;
        }
        let (steps_per_loss, sum) = (steps_per_loss.max(1), f64::from_bits(sum));
        if first + losses.len() * steps_per_loss + count < steps {
            // The earlier part kept no losses: the curve and its time begin here.
            (self.before, self.first) = (0.0, steps);
            return;
        }
        self.curves.resume(losses, steps_per_loss, sum, count);
    }

    /// Removes the metrics of this step and all later ones, since these steps will be repeated.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub fn cut(&mut self, epoch: usize, batch: usize) -> Result<()> {
        let metrics = self.metrics.as_mut().filter(|_| !self.muted);
        Ok(metrics.map_or(Ok(()), |metrics| metrics.cut(self.run, epoch, batch))?)
    }

    /// Goes back to the end of step `done`: the steps from the given one on will be repeated.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub(crate) fn go_back(&mut self, done: usize, (epoch, batch): (usize, usize)) -> Result<()> {
        self.cut(epoch, batch)?;
        self.curves.truncate(done.saturating_sub(self.first));
        self.evaluations.retain(|evaluation| evaluation.step <= done);
        self.experts = self.experts.take().filter(|routed| routed.step <= done);
        self.progress.resume(done);
        Ok(())
    }

    /// Ends the run and returns its losses and further quantities, if kept, its evaluations, and the seconds before a resume.
    pub fn finish(mut self) -> RunSeries {
        // From now on the page is that of the whole run.
        self.page.iter_mut().for_each(LivePage::finish);
        RunSeries { seconds: self.before, ..self.series() }
    }

    fn series(&self) -> RunSeries {
        let (losses, steps_per_loss, _) = self.curves.losses();
        let quantities = self
            .curves
            .quantities()
            .map(|(name, values)| Quantity { name: name.to_string(), values: values.to_vec() });
        RunSeries {
            losses: losses.to_vec(),
            steps_per_loss,
            first_step: self.first,
            evaluations: self.evaluations.clone(),
            experts: self.experts.clone(),
            quantities: quantities.collect(),
            ..RunSeries::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_that_nobody_kept_are_no_steps_of_the_report() {
        let log = |keep| RunLog::new(&LogConfig { keep, ..LogConfig::default() }, None);
        let state = |log: &RunLog<'_>| (log.state().0, log.state().1.to_vec());
        let (mut whole, mut without) = (log(true), log(false));
        for step in 0..3 {
            whole.step(0, step, 1.0).unwrap();
            without.step(0, step, 1.0).unwrap();
        }
        for (kept, expected) in [(state(&whole), (0, 5)), (state(&without), (3, 2))] {
            let mut later = log(true);
            later.resume(3, kept.0, kept.1);
            later.step(0, 3, 2.0).unwrap();
            let kept = state(&later);
            let mut last = log(true);
            last.resume(4, kept.0, kept.1);
            last.step(0, 4, 2.0).unwrap();
            let series = last.finish();
            assert_eq!((series.first_step, series.losses.len()), expected);
            assert!(series.seconds < 60.0);
        }
    }
}
