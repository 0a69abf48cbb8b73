//! Where the losses of a run go: metrics, the report, the bar.

use std::time::Instant;

use report::metrics::{MetricsWriter, StepDetails};
use report::{Evaluation, RunSeries};
use serde::{Deserialize, Serialize};

use crate::console::say;
use crate::error::Result;
use crate::progress::Progress;

/// Points of a report's curve that are kept at most; then neighbours become their means.
const MOST_POINTS: usize = 1 << 17;

/// What to do with the losses of a run.
#[derive(Debug, Default)]
pub struct LogConfig {
    /// Which run of the experiment it is, where it has several. Default: `None`.
    pub run: Option<&'static str>,
    /// Keep losses for a report. Default: false.
    pub keep: bool,
    /// Steps that the run will have. Default: 0.
    pub steps: usize,
    /// Says and writes nothing, unless this rank takes the place of the one that does. Default: false.
    pub muted: bool,
    /// Brings each step's metrics to their file at once, so that none is lost with this process. Default: false.
    pub at_once: bool,
}

/// What a checkpoint keeps of a [`RunLog`], but for the losses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LogState {
    /// The bits of the seconds that training has taken.
    seconds: u64,
    steps_per_loss: usize,
    /// The bits of the sum of losses that are no point yet.
    sum: u64,
    count: usize,
    /// Steps before the first of the losses.
    #[serde(default)]
    first: usize,
}

/// The log of one run, on the rank that prints.
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
    /// Steps whose losses nobody has kept: those before the first.
    first: usize,
    evaluations: Vec<Evaluation>,
}

impl<'a> RunLog<'a> {
    /// Begins a run.
    pub fn new(config: &LogConfig, metrics: Option<&'a mut MetricsWriter>) -> Self {
        let &LogConfig { run, keep, steps, muted, at_once } = config;
        let progress = if muted { Progress::nowhere() } else { Progress::new(steps) };
        let (curve, began) = (Curve::new(MOST_POINTS), Instant::now());
        let (before, first, evaluations) = (0.0, 0, Vec::new());
        Self { run, metrics, keep, muted, at_once, steps, curve, progress, began, before, first, evaluations }
    }

    /// The loss of one step.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn step(&mut self, epoch: usize, batch: usize, loss: f32) -> Result<()> {
        self.log_step((epoch, batch), loss, None)
    }

    /// The same with more to tell.
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

    /// What an evaluation came to; ranks that have lost another one may do one again.
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

    /// All evaluations so far.
    pub fn evaluations(&self) -> &[Evaluation] {
        &self.evaluations
    }

    /// Goes on with these.
    pub fn resume_evaluations(&mut self, evaluations: Vec<Evaluation>) {
        self.evaluations = evaluations;
    }

    /// The run goes on after so many steps, of whose losses nothing is kept.
    pub(crate) fn begin_at(&mut self, steps: usize) {
        self.first = steps;
        self.progress.resume(steps);
    }

    /// This rank takes the place of the one that has written until now, with so many steps done and this one the next.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub fn take_over(&mut self, done: usize, (epoch, batch): (usize, usize)) -> Result<()> {
        self.muted = false;
        self.progress = Progress::new(self.steps);
        self.progress.resume(done);
        self.cut(epoch, batch)?;
        // Perhaps the other one had not told of it.
        match self.evaluations.last().cloned() {
            Some(last) => self.write_evaluation(&last),
            None => Ok(()),
        }
    }

    /// Whether the metrics have this step; none where there are none.
    ///
    /// # Errors
    /// Metrics that cannot be read.
    pub fn has(&mut self, epoch: usize, batch: usize) -> Result<Option<bool>> {
        Ok(self.metrics.as_mut().map(|metrics| metrics.has(self.run, epoch, batch)).transpose()?)
    }

    /// Writes the metrics of a step that this rank has counted before.
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

    /// Seconds that the run had taken when it went on from a checkpoint.
    pub(crate) fn before(&self) -> f64 {
        self.before
    }

    /// Where the metrics go, on the rank that prints.
    pub(crate) fn metrics(&mut self) -> Option<&mut MetricsWriter> {
        self.metrics.as_deref_mut().filter(|_| !self.muted)
    }

    /// True for the log of a rank that does not print.
    pub fn is_muted(&self) -> bool {
        self.muted
    }

    /// Prints a line of the tutorial.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    pub fn say(&self, line: std::fmt::Arguments<'_>) -> Result<()> {
        if self.muted {
            return Ok(());
        }
        self.progress.aside(|| say(line))
    }

    /// Brings all metrics so far to their file.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.metrics.as_mut().map_or(Ok(()), |metrics| metrics.flush())?)
    }

    /// What a checkpoint is to keep: numbers, and the losses.
    pub fn state(&self) -> (LogState, &[f32]) {
        let Curve { losses, steps_per_loss, sum, count, .. } = &self.curve;
        let seconds = self.before + self.began.elapsed().as_secs_f64();
        let (seconds, sum) = (seconds.to_bits(), sum.to_bits());
        let (steps_per_loss, count, first) = (*steps_per_loss, *count, self.first);
        (LogState { seconds, steps_per_loss, sum, count, first }, losses)
    }

    /// Goes on from what [`state`](Self::state) gave, after so many steps.
    pub fn resume(&mut self, steps: usize, state: LogState, losses: Vec<f32>) {
        let LogState { seconds, steps_per_loss, sum, count, first } = state;
        (self.before, self.first) = (f64::from_bits(seconds), first);
        self.progress.resume(steps);
        if !self.keep {
            return;
        }
        let (steps_per_loss, sum) = (steps_per_loss.max(1), f64::from_bits(sum));
        if first + losses.len() * steps_per_loss + count < steps {
            // Kept without losses: what is shown begins here, and so does its time.
            (self.before, self.first) = (0.0, steps);
            return;
        }
        self.curve = Curve { losses, steps_per_loss, sum, count, ..Curve::new(MOST_POINTS) };
    }

    /// Forgets the metrics of steps from this one on: they will be taken again.
    ///
    /// # Errors
    /// Metrics that cannot be read or written.
    pub fn cut(&mut self, epoch: usize, batch: usize) -> Result<()> {
        let metrics = self.metrics.as_mut().filter(|_| !self.muted);
        Ok(metrics.map_or(Ok(()), |metrics| metrics.cut(self.run, epoch, batch))?)
    }

    /// Ends the run; its losses, where they were kept, and the seconds before a resume.
    pub fn finish(self) -> RunSeries {
        let Curve { losses, steps_per_loss, .. } = self.curve;
        let (seconds, first_step) = (self.before, self.first);
        let evaluations = self.evaluations;
        RunSeries { losses, steps_per_loss, first_step, seconds, evaluations, ..RunSeries::default() }
    }
}

/// Losses, or where they are many, means of as many neighbours each.
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
            // What has been counted is half a point now.
            if self.count < self.steps_per_loss {
                return;
            }
        }
        self.losses.push((self.sum / self.count as f64) as f32);
        (self.sum, self.count) = (0.0, 0);
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
        let mut short = Curve::new(8);
        (0..8).for_each(|step| short.push(step as f32));
        assert_eq!((short.steps_per_loss, short.losses), (1, (0..8).map(|step| step as f32).collect()));
    }
}
