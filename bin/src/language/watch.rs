//! What is printed and written while a model is trained.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm::{Communicator, all_gather_object};
use girandole::Parallel;
use girandole::trainer::{Observer, StepReport};
use indicatif::HumanDuration;
use models::{CausalLm, Tokenizer};
use report::metrics::StepDetails;

use crate::console::note;
use crate::error::Error;
use crate::rank::Stage;
use crate::run_log::RunLog;

use super::options::TrainOptions;
use super::sample::Sample;

/// Prints, on rank 0; computes samples, on all.
pub(super) struct Watch<'a> {
    options: &'a TrainOptions,
    log: Option<RunLog<'a>>,
    sample: Option<(&'a Tokenizer, &'a Sample)>,
    /// Since the last line.
    targets: usize,
    seconds: f64,
    /// When the run began, after so many steps.
    began: (Instant, usize),
    /// The group of those that are left, where ranks were lost.
    left: Option<Arc<dyn Communicator>>,
    last: Option<StepReport>,
    /// That of the first one.
    epoch: usize,
    /// Others have not begun: all begin anew.
    begins_anew: bool,
}

impl<'a> Watch<'a> {
    pub(super) fn new(
        options: &'a TrainOptions,
        log: Option<RunLog<'a>>,
        sample: Option<(&'a Tokenizer, &'a Sample)>,
        (begun, epoch): (usize, usize),
    ) -> Self {
        Self {
            options,
            log,
            sample,
            targets: 0,
            seconds: 0.0,
            began: (Instant::now(), begun),
            left: None,
            last: None,
            epoch,
            begins_anew: false,
        }
    }

    pub(super) fn finish(self) -> Option<RunLog<'a>> {
        self.log
    }

    /// The group of those that are left, where ranks were lost.
    pub(super) fn group(&self) -> Option<&Arc<dyn Communicator>> {
        self.left.as_ref()
    }

    /// What ended the training.
    pub(super) fn cause(&self, error: girandole::Error) -> Error {
        if self.begins_anew { Error::BeginAnew } else { error.into() }
    }

    fn say(&self, line: std::fmt::Arguments<'_>) -> girandole::Result<()> {
        self.log.as_ref().map_or(Ok(()), |log| log.say(line)).map_err(told)
    }

    /// How long the steps that are left will take, if they take as long as those of this run, with all that was done between them.
    fn left(&self, step: usize) -> String {
        let (began, begun) = self.began;
        let left = self.options.steps().saturating_sub(step);
        let each = began.elapsed().as_secs_f64() / step.saturating_sub(begun).max(1) as f64;
        match Duration::try_from_secs_f64(each * left as f64) {
            Ok(time) if left > 0 => format!(", {:#} left", HumanDuration(time)),
            _ => String::new(),
        }
    }
}

impl Observer<CausalLm> for Watch<'_> {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        let StepReport { step, epoch, loss, grad_norm, learning_rate, targets, seconds, .. } = *report;
        self.targets += targets;
        self.seconds += seconds;
        self.last = Some(*report);
        if let Some(log) = &mut self.log {
            log.step_with(epoch as usize, step - 1, loss as f32, &details(report)).map_err(told)?;
        }
        let steps = self.options.steps();
        if report.skipped {
            let scale = report.loss_scale;
            self.say(format_args!(
                "step {step}/{steps}: skipped, a gradient was not finite with a loss scale of {scale}"
            ))?;
        }
        if step.is_multiple_of(self.options.log_every) || step == steps {
            let speed = std::mem::take(&mut self.targets) as f64 / std::mem::take(&mut self.seconds);
            self.say(format_args!(
                "step {step}/{steps}: loss {loss:.4}, learning rate {learning_rate:.2e}, norm {grad_norm:.3}, {speed:.0} tokens/s{}",
                self.left(step)
            ))?;
        }
        Ok(())
    }

    fn evaluated(&mut self, step: usize, loss: f64, model: &mut Parallel<CausalLm>) -> girandole::Result<()> {
        self.say(format_args!("step {step}: evaluation loss {loss:.4}, perplexity {:.2}", loss.exp()))?;
        let Some((tokenizer, sample)) = self.sample else { return Ok(()) };
        if let Some(text) = sample.write(model, tokenizer)? {
            self.say(format_args!("step {step}: sample {text:?}"))?;
        }
        Ok(())
    }

    fn saving(&mut self, _: usize) -> girandole::Result<()> {
        // A run that goes on from it has the metrics of all steps before.
        self.log.as_mut().map_or(Ok(()), RunLog::flush).map_err(told)
    }

    fn lost(&mut self, left: &Arc<dyn Communicator>) -> girandole::Result<()> {
        self.left = Some(left.clone());
        let stages: Vec<Stage> = all_gather_object(&**left, &Stage::AtWork)?;
        // Without those that are not at work no step can have been taken.
        self.begins_anew = stages.iter().any(|stage| *stage < Stage::AtWork);
        if self.begins_anew { Err(told(Error::BeginAnew)) } else { Ok(()) }
    }

    fn regrouped(
        &mut self,
        step: usize,
        before: usize,
        lost: &comm::Error,
        left: &Arc<dyn Communicator>,
    ) -> girandole::Result<()> {
        if left.rank() > 0 {
            return Ok(());
        }
        if let Some(log) = self.log.as_mut().filter(|log| log.is_muted()) {
            let epoch = self.last.map_or(self.epoch, |last| last.epoch as usize);
            log.take_over(step, (epoch, step)).map_err(told)?;
            // Perhaps the one that is lost had not told of the last step.
            if let Some(last) = &self.last
                && log.has(epoch, step - 1).map_err(told)? == Some(false)
            {
                log.write_again((epoch, step - 1), last.loss as f32, Some(&details(last))).map_err(told)?;
            }
        }
        let ranks = left.world_size();
        let go = if ranks == 1 { "rank goes" } else { "ranks go" };
        note(format_args!("{lost}; {ranks} of {before} {go} on after step {step}"));
        Ok(())
    }

    fn saved(&mut self, step: usize, folder: &Path) -> girandole::Result<()> {
        tracing::debug!("checkpoint of step {step} in {}", folder.display());
        Ok(())
    }
}

fn details(report: &StepReport) -> StepDetails {
    StepDetails {
        learning_rate: report.learning_rate,
        grad_norm: report.grad_norm,
        tokens_per_second: report.targets as f64 / report.seconds,
        loss_scale: (report.loss_scale != 1.0).then_some(report.loss_scale),
    }
}

/// An error of this program's through the training loop.
fn told(error: Error) -> girandole::Error {
    candle_core::Error::wrap(error).into()
}
