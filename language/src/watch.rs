//! Training observer: prints and logs steps, evaluations and samples.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm::{Communicator, all_gather_object};
use experiment::console::note;
use experiment::error::Error;
use experiment::rank::RankPhase;
use experiment::run_log::RunLog;
use girandole::trainer::{Observer, ObserverState, StepReport};
use girandole::{Layout, Parallel};
use indicatif::HumanDuration;
use models::{CausalLm, Tokenizer};
use report::Evaluation;

use super::events::Events;
use super::log_state;
use super::options::TrainOptions;
use super::sample::Sample;
use super::speed::Speed;

/// Prints on rank 0, computes samples on all ranks, and lets a remaining rank replace a lost rank 0.
pub(super) struct TrainObserver<'a> {
    options: &'a TrainOptions,
    log: Option<RunLog<'a>>,
    events: Events<'a>,
    sample: Option<(&'a Tokenizer, &'a Sample)>,
    speed: Speed,
    /// Counters since the last printed line.
    targets: usize,
    steps: usize,
    seconds: f64,
    /// When the run began, and the number of steps done before it.
    began: (Instant, usize),
    /// The group of the remaining ranks, if ranks were lost.
    left: Option<Arc<dyn Communicator>>,
    last: Option<StepReport>,
    /// Epoch of the first step.
    epoch: usize,
    /// Seconds of the steps so far, and those of them in collectives, in all groups of the mesh.
    times: &'a Cell<(f64, f64)>,
    /// Whether the ranks must start from the beginning, since a rank had not begun training when another was lost.
    begins_anew: bool,
}

impl<'a> TrainObserver<'a> {
    pub(super) fn new(
        options: &'a TrainOptions,
        log: Option<RunLog<'a>>,
        sample: Option<(&'a Tokenizer, &'a Sample)>,
        (speed, begun, epoch, times): (Speed, usize, usize, &'a Cell<(f64, f64)>),
    ) -> Self {
        Self {
            options,
            log,
            events: Events::new(options.tensorboard.as_deref()),
            sample,
            speed,
            targets: 0,
            steps: 0,
            seconds: 0.0,
            began: (Instant::now(), begun),
            left: None,
            last: None,
            epoch,
            times,
            begins_anew: false,
        }
    }

    /// Returns the log, and the speed scaled to the remaining ranks.
    pub(super) fn finish(self) -> (Option<RunLog<'a>>, Speed) {
        (self.log, self.speed)
    }

    /// Returns the group of the remaining ranks, if ranks were lost.
    pub(super) fn group(&self) -> Option<&Arc<dyn Communicator>> {
        self.left.as_ref()
    }

    /// Converts the error that ended the training.
    pub(super) fn cause(&self, error: girandole::Error) -> Error {
        match error {
            _ if self.begins_anew => Error::RestartFromBeginning,
            // Before the first checkpoint.
            girandole::Error::StateLost { lost } if self.options.checkpoints.checkpoint_dir.is_some() => {
                if self.left.as_ref().is_some_and(|left| left.rank() == 0) {
                    note(format_args!("{lost}; the others start again, as there is no checkpoint yet"));
                }
                Error::RestartFromBeginning
            }
            error => error.into(),
        }
    }

    fn say(&self, line: std::fmt::Arguments<'_>) -> girandole::Result<()> {
        self.log.as_ref().map_or(Ok(()), |log| log.say(line)).map_err(wrap_error)
    }

    /// Formats the remaining time, at the mean speed of this run so far, including everything done between steps.
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

impl TrainObserver<'_> {
    /// Writes metrics and TensorBoard events of a step, on the rank that writes them.
    fn write(&mut self, report: &StepReport) -> girandole::Result<()> {
        let Some(log) = &mut self.log else { return Ok(()) };
        let details = self.speed.details(report);
        log.step_with(report.epoch as usize, report.step - 1, report.loss as f32, &details)
            .map_err(wrap_error)?;
        match log.is_muted() {
            true => Ok(()),
            false => self.events.stepped(report, &details).map_err(wrap_error),
        }
    }
}

impl Observer<CausalLm> for TrainObserver<'_> {
    fn stepped(&mut self, report: &StepReport) -> girandole::Result<()> {
        let StepReport { step, loss, grad_norm, learning_rate, targets, seconds, .. } = *report;
        self.targets += targets;
        self.steps += 1;
        self.seconds += seconds;
        let (of_steps, in_collectives) = self.times.get();
        self.times.set((of_steps + seconds, in_collectives + report.communication_seconds));
        self.last = Some(*report);
        self.write(report)?;
        let steps = self.options.steps();
        if report.skipped {
            let scale = report.loss_scale;
            self.say(format_args!(
                "step {step}/{steps}: skipped, a gradient was not finite with a loss scale of {scale}"
            ))?;
        }
        let is_first = step == self.began.1 + 1;
        if is_first || step.is_multiple_of(self.options.log_every) || step == steps {
            let seconds = std::mem::take(&mut self.seconds);
            let speed = std::mem::take(&mut self.targets) as f64 / seconds;
            let (_, mfu) = self.speed.of(std::mem::take(&mut self.steps), seconds);
            self.say(format_args!(
                "step {step}/{steps}: loss {loss:.4}, learning rate {learning_rate:.2e}, norm {grad_norm:.3}, {speed:.0} tokens/s, MFU {:.0} %{}",
                100.0 * mfu,
                self.left(step)
            ))?;
        }
        Ok(())
    }

    fn evaluated(&mut self, step: usize, loss: f64, model: &mut Parallel<CausalLm>) -> girandole::Result<()> {
        self.say(format_args!("step {step}: evaluation loss {loss:.4}, perplexity {:.2}", loss.exp()))?;
        if self.log.as_ref().is_some_and(|log| !log.is_muted()) {
            self.events.evaluated(step, loss).map_err(wrap_error)?;
        }
        let text = match self.sample {
            Some((tokenizer, sample)) => {
                Some(tracing::info_span!("sample").in_scope(|| sample.write(model, tokenizer))?)
            }
            None => None,
        };
        if let Some(text) = &text {
            self.say(format_args!("step {step}: sample {text:?}"))?;
        }
        let evaluation = Evaluation { step, loss, sample: text };
        self.log.as_mut().map_or(Ok(()), |log| log.evaluated(evaluation)).map_err(wrap_error)
    }

    fn state(&self) -> girandole::Result<ObserverState> {
        self.log.as_ref().map_or_else(|| Ok(ObserverState::default()), log_state::of)
    }

    fn saving(&mut self, _: usize) -> girandole::Result<()> {
        // A run that is resumed from this checkpoint needs the metrics of all earlier steps.
        self.log.as_mut().map_or(Ok(()), RunLog::flush).map_err(wrap_error)
    }

    fn lost(&mut self, left: &Arc<dyn Communicator>) -> girandole::Result<bool> {
        self.left = Some(left.clone());
        let stages: Vec<RankPhase> = all_gather_object(&**left, &RankPhase::AtWork)?;
        // If any rank has not begun training, no step can have been completed.
        self.begins_anew = stages.iter().any(|stage| *stage < RankPhase::AtWork);
        if self.begins_anew {
            return Err(wrap_error(Error::RestartFromBeginning));
        }
        Ok(stages.iter().all(|stage| *stage < RankPhase::Trained))
    }

    fn regrouped(
        &mut self,
        step: usize,
        before: usize,
        lost: &comm::Error,
        (left, layout): (&Arc<dyn Communicator>, &Layout),
    ) -> girandole::Result<()> {
        self.left = Some(left.clone());
        self.speed.shrink(left.world_size(), before);
        if self.last.is_some_and(|last| last.step > step) {
            // Steps that only lost ranks had completed, or that no rank's memory has any more, are repeated.
            let epoch = self.last.take().map_or(self.epoch, |last| last.epoch as usize);
            if let Some(log) = &mut self.log {
                log.go_back(step, (epoch, step)).map_err(wrap_error)?;
            }
        }
        if left.rank() > 0 {
            return Ok(());
        }
        if let Some(log) = self.log.as_mut().filter(|log| log.is_muted()) {
            let epoch = self.last.map_or(self.epoch, |last| last.epoch as usize);
            log.take_over(step, (epoch, step)).map_err(wrap_error)?;
            // The lost rank may not have logged the last step.
            if let Some(last) = &self.last
                && log.has(epoch, step - 1).map_err(wrap_error)? == Some(false)
            {
                let details = self.speed.details(last);
                log.write_again((epoch, step - 1), last.loss as f32, Some(&details)).map_err(wrap_error)?;
                self.events.stepped(last, &details).map_err(wrap_error)?;
            }
        }
        let ranks = left.world_size();
        let go = if ranks == 1 { "rank goes" } else { "ranks go" };
        let layout = match layout.dp == ranks {
            true => String::new(),
            false => format!(" in the layout {layout}"),
        };
        note(format_args!("{lost}; {ranks} of {before} {go} on after step {step}{layout}"));
        Ok(())
    }
}

/// Wraps an error of this program so that it passes through the training loop.
pub(super) fn wrap_error(error: Error) -> girandole::Error {
    match error {
        Error::Comm(error) => error.into(),
        error => comm::carry(error).into(),
    }
}
