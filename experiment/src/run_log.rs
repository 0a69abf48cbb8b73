//! Log of a run's losses: metrics file, report and progress bar.

use std::time::Instant;

use report::metrics::{MetricsWriter, StepDetails};
use report::{Evaluation, RunSeries};
use serde::{Deserialize, Serialize};

use crate::console::say;
use crate::error::Result;
use crate::progress::Progress;

/// Maximum number of points kept for the report's curve; beyond it, neighbouring points are averaged.
const MOST_POINTS: usize = 1 << 17;

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
pub struct LogState {
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
    curve: Curve,
    progress: Progress,
    began: Instant,
    /// Seconds of training before a resume.
    before: f64,
    /// Number of steps at the beginning whose losses were not kept.
    first: usize,
    evaluations: Vec<Evaluation>,
}

impl<'a> RunLog<'a> {
    /// Starts the log of a run.
    pub fn new(config: &LogConfig, metrics: Option<&'a mut MetricsWriter>) -> Self {
        let &LogConfig { run, keep, steps, muted, at_once } = config;
        let progress = if muted { Progress::nowhere() } else { Progress::new(steps) };
        let (curve, began) = (Curve::new(MOST_POINTS), Instant::now());
        let (before, first, evaluations) = (0.0, 0, Vec::new());
        Self { run, metrics, keep, muted, at_once, steps, curve, progress, began, before, first, evaluations }
    }

    /// Logs the loss of one step.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn step(&mut self, epoch: usize, batch: usize, loss: f32) -> Result<()> {
        self.log_step((epoch, batch), loss, None)
    }

    /// Logs the loss of one step with further details.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn step_with(&mut self, epoch: usize, batch: usize, loss: f32, details: &StepDetails) -> Result<()> {
        self.progress.speed(details.tokens_per_second);
        self.log_step((epoch, batch), loss, Some(details))
    }

    fn log_step(
        &mut self,
        (epoch, batch): (usize, usize),
        loss: f32,
        details: Option<&StepDetails>,
    ) -> Result<()> {
        if let (Some(metrics), false) = (&mut self.metrics, self.muted) {
            match details {
                Some(details) => metrics.step_with(self.run, (epoch, batch), loss, details)?,
                None => metrics.step(self.run, epoch, batch, loss)?,
            }
            if self.at_once {
                metrics.flush()?;
            }
        }
        if self.keep {
            self.curve.push(loss);
        }
        self.progress.step();
        Ok(())
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
        Ok(())
    }

    fn write_evaluation(&mut self, evaluation: &Evaluation) -> Result<()> {
        let Some(metrics) = self.metrics.as_deref_mut().filter(|_| !self.muted) else { return Ok(()) };
        if !metrics.has_evaluation(self.run, evaluation.step)? {
            metrics.evaluation(self.run, evaluation)?;
        }
        if self.at_once { Ok(metrics.flush()?) } else { Ok(()) }
    }

    /// Returns all evaluations so far.
    pub fn evaluations(&self) -> &[Evaluation] {
        &self.evaluations
    }

    /// Restores the evaluations of a resumed run.
    pub fn resume_evaluations(&mut self, evaluations: Vec<Evaluation>) {
        self.evaluations = evaluations;
    }

    /// Starts after `steps` steps whose losses were not kept.
    pub fn begin_at(&mut self, steps: usize) {
        self.first = steps;
        self.progress.resume(steps);
    }

    /// Makes this rank the reporter in place of a lost one; `done` steps are complete, and the given one is next.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub fn take_over(&mut self, done: usize, (epoch, batch): (usize, usize)) -> Result<()> {
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
    pub fn write_again(
        &mut self,
        (epoch, batch): (usize, usize),
        loss: f32,
        details: Option<&StepDetails>,
    ) -> Result<()> {
        let Some(metrics) = &mut self.metrics else { return Ok(()) };
        match details {
            Some(details) => metrics.step_with(self.run, (epoch, batch), loss, details)?,
            None => metrics.step(self.run, epoch, batch, loss)?,
        }
        Ok(())
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
    pub fn is_muted(&self) -> bool {
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

    /// Returns what a checkpoint stores: the state, and the losses.
    pub fn state(&self) -> (LogState, &[f32]) {
        let Curve { losses, steps_per_loss, sum, count, .. } = &self.curve;
        let seconds = self.before + self.began.elapsed().as_secs_f64();
        let (seconds, sum) = (seconds.to_bits(), sum.to_bits());
        let (steps_per_loss, count, first) = (*steps_per_loss, *count, self.first);
        (LogState { seconds, steps_per_loss, sum, count, first }, losses)
    }

    /// Restores what [`state`](Self::state) returned, after `steps` steps.
    pub fn resume(&mut self, steps: usize, state: LogState, losses: Vec<f32>) {
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
        self.curve = Curve { losses, steps_per_loss, sum, count, ..Curve::new(MOST_POINTS) };
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
    pub fn go_back(&mut self, done: usize, (epoch, batch): (usize, usize)) -> Result<()> {
        self.cut(epoch, batch)?;
        self.curve.truncate(done.saturating_sub(self.first));
        self.evaluations.retain(|evaluation| evaluation.step <= done);
        self.progress.resume(done);
        Ok(())
    }

    /// Ends the run and returns its losses, if kept, its evaluations, and the seconds before a resume.
    pub fn finish(self) -> RunSeries {
        let Curve { losses, steps_per_loss, .. } = self.curve;
        let (seconds, first_step) = (self.before, self.first);
        let evaluations = self.evaluations;
        RunSeries { losses, steps_per_loss, first_step, seconds, evaluations, ..RunSeries::default() }
    }
}

/// Losses, or for a long run the means of `steps_per_loss` consecutive losses.
#[derive(Debug)]
struct Curve {
    losses: Vec<f32>,
    most: usize,
    steps_per_loss: usize,
    sum: f64,
    count: usize,
}

impl Curve {
    fn new(most: usize) -> Self {
        Self { losses: Vec::new(), most, steps_per_loss: 1, sum: 0.0, count: 0 }
    }

    fn push(&mut self, loss: f32) {
        self.sum += f64::from(loss);
        self.count += 1;
        if self.count < self.steps_per_loss {
            return;
        }
        if self.losses.len() == self.most {
            self.losses =
                self.losses.chunks(2).map(|pair| pair.iter().sum::<f32>() / pair.len() as f32).collect();
            self.steps_per_loss *= 2;
            // The point just completed counts as half a point at the new resolution.
            if self.count < self.steps_per_loss {
                return;
            }
        }
        self.losses.push((self.sum / self.count as f64) as f32);
        (self.sum, self.count) = (0.0, 0);
    }

    /// Keeps the losses of the first `steps` steps.
    fn truncate(&mut self, steps: usize) {
        let (points, count) = (steps / self.steps_per_loss, steps % self.steps_per_loss);
        let mean = match self.losses.get(points) {
            Some(mean) => f64::from(*mean),
            None => self.sum / self.count.max(1) as f64,
        };
        self.losses.truncate(points);
        (self.sum, self.count) = (mean * count as f64, count);
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

    #[test]
    fn a_long_run_becomes_means_and_stays_small() {
        let mut curve = Curve::new(8);
        (0..64).for_each(|step| curve.push(step as f32));
        assert_eq!((curve.steps_per_loss, curve.losses.len()), (8, 8));
        assert_eq!(curve.losses[..2], [3.5, 11.5]);
        curve.truncate(20);
        assert_eq!((&curve.losses[..], curve.sum, curve.count), (&[3.5, 11.5][..], 4.0 * 19.5, 4));
        (20..24).for_each(|step| curve.push(step as f32));
        assert_eq!((curve.losses.len(), curve.count), (3, 0));
        let mut short = Curve::new(8);
        (0..8).for_each(|step| short.push(step as f32));
        assert_eq!((short.steps_per_loss, short.losses), (1, (0..8).map(|step| step as f32).collect()));
    }
}
