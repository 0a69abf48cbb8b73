//! Training observer: prints and logs steps, evaluations and samples.

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::console::note;
use crate::error::Error;
use crate::rank::{RankPhase, have_come};
use crate::run_log::RunLog;
use comm::{Communicator, all_gather_object};
use girandole::trainer::{Observer, ObserverState, Regrouping, StepReport};
use girandole::{ExpertLoad, Parallel, PreferenceReport};
use indicatif::HumanDuration;
use models::{CausalLm, Tokenizer};
use report::{Evaluation, RoutedTokens, RouterTokens};

use super::events::Events;
use super::options::TrainOptions;
use super::pairs::RunData;
use super::sample::Sample;
use super::speed::{Speed, pair_metrics, show_mfu};

/// The steps of this rank so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    pub(super) steps: usize,
    /// Seconds of all steps, and those of them in collectives, in all groups of the mesh.
    pub(super) seconds: f64,
    pub(super) communication_seconds: f64,
}

/// Prints on rank 0, computes samples on all ranks, and lets a remaining rank replace a lost rank 0.
pub(super) struct TrainObserver<'a> {
    options: &'a TrainOptions,
    data: &'a RunData,
    log: Option<RunLog<'a>>,
    events: Events<'a>,
    sample: Option<(&'a Tokenizer, &'a Sample)>,
    speed: Speed,
    /// Counters since the last printed line.
    tokens: f64,
    steps: usize,
    seconds: f64,
    /// When the run began, and the number of steps done before it.
    began: (Instant, usize),
    /// The group of all ranks, if it has changed.
    group: Option<Arc<dyn Communicator>>,
    /// How far this rank has got, for the others.
    phase: RankPhase,
    last: Option<StepReport>,
    times: &'a Cell<Times>,
    /// Whether the ranks must start from the beginning, since a rank had not begun training when another was lost.
    begins_anew: bool,
}

impl<'a> TrainObserver<'a> {
    pub(super) fn new(
        options: &'a TrainOptions,
        data: &'a RunData,
        log: Option<RunLog<'a>>,
        sample: Option<(&'a Tokenizer, &'a Sample)>,
        speed: Speed,
        begun: usize,
        times: &'a Cell<Times>,
        phase: RankPhase,
    ) -> Self {
        Self {
            options,
            data,
            log,
            events: Events::new(options.tensorboard.as_deref()),
            sample,
            speed,
            tokens: 0.0,
            steps: 0,
            seconds: 0.0,
            began: (Instant::now(), begun),
            group: None,
            phase,
            last: None,
            times,
            begins_anew: false,
        }
    }

    /// Returns the log, and the speed scaled to the current ranks.
    pub(super) fn finish(self) -> (Option<RunLog<'a>>, Speed) {
        (self.log, self.speed)
    }

    /// Returns the group of all ranks, if it has changed.
    pub(super) fn group(&self) -> Option<&Arc<dyn Communicator>> {
        self.group.as_ref()
    }

    /// Converts the error that ended the training.
    pub(super) fn cause(&self, error: girandole::Error) -> Error {
        match error {
            _ if self.begins_anew => Error::RestartFromBeginning,
            // Before the first checkpoint.
            girandole::Error::StateLost { lost } if self.options.checkpoints.checkpoint_dir.is_some() => {
                if self.group.as_ref().is_some_and(|group| group.rank() == 0) {
                    note(format_args!("{lost}; the others start again, as there is no checkpoint yet"));
                }
                Error::RestartFromBeginning
            }
            girandole::Error::Stopped { step, signal } => {
                Error::Stopped { step, signal, dir: self.options.checkpoints.dir().to_path_buf() }
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
    /// Whether a line of this step is printed.
    fn is_logged(&self, step: usize) -> bool {
        let is_first = step == self.began.1 + 1;
        is_first || step.is_multiple_of(self.options.log_every) || step == self.options.steps()
    }

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
        let StepReport { step, loss, grad_norm, learning_rate, seconds, .. } = *report;
        self.tokens += self.speed.tokens(report.targets, 1);
        self.steps += 1;
        self.seconds += seconds;
        let Times { steps: done, seconds: so_far, communication_seconds } = self.times.get();
        self.times.set(Times {
            steps: done + 1,
            seconds: so_far + seconds,
            communication_seconds: communication_seconds + report.communication_seconds,
        });
        self.last = Some(*report);
        self.write(report)?;
        let steps = self.options.steps();
        if report.skipped {
            let scale = report.loss_scale;
            self.say(format_args!(
                "step {step}/{steps}: skipped, a gradient was not finite with a loss scale of {scale}"
            ))?;
        }
        if self.is_logged(step) {
            let seconds = std::mem::take(&mut self.seconds);
            let speed = std::mem::take(&mut self.tokens) / seconds;
            let (_, mfu) = self.speed.of(std::mem::take(&mut self.steps), seconds);
            self.say(format_args!(
                "step {step}/{steps}: loss {loss:.4}, learning rate {learning_rate:.2e}, norm {grad_norm:.3}, {}{}{speed:.0} tokens/s, {}{}",
                show_pairs(report.preferences.as_ref()),
                show_balance(report.balance_loss),
                show_mfu(mfu),
                self.left(step)
            ))?;
        }
        Ok(())
    }

    fn routed(&mut self, step: usize, loads: &[ExpertLoad]) -> girandole::Result<()> {
        let is_logged = self.is_logged(step);
        let Some(log) = self.log.as_mut().filter(|_| is_logged) else { return Ok(()) };
        let tokens = |load: &ExpertLoad| load.tokens.iter().map(|tokens| tokens.round() as u64).collect();
        let router = |load: &ExpertLoad| RouterTokens { router: load.router.clone(), tokens: tokens(load) };
        let routed = RoutedTokens { step, routers: loads.iter().map(router).collect() };
        log.experts(routed).map_err(wrap_error)
    }

    fn evaluated(
        &mut self,
        step: usize,
        evaluation: &girandole::Evaluation,
        model: &mut Parallel<CausalLm>,
    ) -> girandole::Result<()> {
        let loss = evaluation.loss;
        let measures = match &evaluation.preferences {
            Some(pairs) => pair_metrics(pairs).measures().into(),
            None => {
                self.data.rows.labels().map(|labels| labels.measures(&evaluation.sums)).unwrap_or_default()
            }
        };
        let shown = match measures.is_empty() {
            true => format!(", perplexity {:.2}", loss.exp()),
            false => show_measures(&measures, " "),
        };
        self.say(format_args!("step {step}: evaluation loss {loss:.4}{shown}"))?;
        if self.log.as_ref().is_some_and(|log| !log.is_muted()) {
            self.events.evaluated(step, loss, &measures).map_err(wrap_error)?;
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
        let measures = measures.into_iter().map(|(name, measure)| (name.to_string(), measure)).collect();
        let evaluation = Evaluation { step, loss, sample: text, measures };
        self.log.as_mut().map_or(Ok(()), |log| log.evaluated(evaluation)).map_err(wrap_error)
    }

    fn state(&self) -> girandole::Result<ObserverState> {
        let mut state = self.log.as_ref().map_or_else(|| Ok(ObserverState::default()), RunLog::saved)?;
        self.data.add_to(&mut state)?;
        Ok(state)
    }

    fn saving(&mut self, _: usize) -> girandole::Result<()> {
        // A run that is resumed from this checkpoint needs the metrics of all earlier steps.
        self.log.as_mut().map_or(Ok(()), RunLog::flush).map_err(wrap_error)
    }

    fn regrouping(&mut self, world: &Arc<dyn Communicator>) -> girandole::Result<bool> {
        self.group = Some(world.clone());
        let phases: Vec<RankPhase> = all_gather_object(&**world, &self.phase)?;
        self.begins_anew = phases.iter().any(|phase| phase.is_before_training());
        if self.begins_anew {
            return Err(wrap_error(Error::RestartFromBeginning));
        }
        Ok(phases.iter().all(|phase| *phase < RankPhase::Trained))
    }

    fn regrouped(&mut self, step: usize, change: &Regrouping<'_>) -> girandole::Result<()> {
        let Regrouping { before, world, epoch, .. } = *change;
        let next = (epoch as usize, step);
        self.group = Some(world.clone());
        self.speed.scale(world.world_size(), before.world_size());
        if self.last.is_some_and(|last| last.step > step) {
            // Steps that only lost ranks had completed, or that no rank's memory has any more, are repeated.
            self.last = None;
            self.events.go_back(step);
            if let Some(log) = &mut self.log {
                log.go_back(step, next).map_err(wrap_error)?;
            }
        }
        if world.rank() > 0 {
            return Ok(());
        }
        if let Some(log) = self.log.as_mut().filter(|log| log.is_muted()) {
            log.take_over(step, next).map_err(wrap_error)?;
            // The lost rank may not have logged the last step.
            if let Some(last) = &self.last
                && let at = (last.epoch as usize, last.step - 1)
                && log.has(at.0, at.1).map_err(wrap_error)? == Some(false)
            {
                let details = self.speed.details(last);
                log.write_again(at, last.loss as f32, Some(&details)).map_err(wrap_error)?;
                self.events.stepped(last, &details).map_err(wrap_error)?;
            }
        }
        note(format_args!("{}", describe(change, step)));
        Ok(())
    }

    fn joined(
        &mut self,
        step: usize,
        mut state: ObserverState,
        change: &Regrouping<'_>,
    ) -> girandole::Result<()> {
        self.data.take_from(&mut state)?;
        self.group = Some(change.world.clone());
        self.phase = RankPhase::AtWork;
        self.began = (Instant::now(), step);
        if let Some(log) = &mut self.log {
            log.restore(step, state).map_err(wrap_error)?;
            // What the other ranks repeat was logged already.
            log.go_back(step, (change.epoch as usize, step)).map_err(wrap_error)?;
        }
        Ok(())
    }
}

/// Describes a change of the group, such as `rank 3 has come; 3 ranks go on after step 12`.
fn describe(Regrouping { before, world, layout, lost, .. }: &Regrouping<'_>, step: usize) -> String {
    let is_new = |number: &&usize| !before.world_ranks().contains(number);
    let new: Vec<usize> = world.world_ranks().iter().filter(is_new).copied().collect();
    let lost = lost.map(|lost| format!("{lost}; ")).unwrap_or_default();
    let come = if new.is_empty() { String::new() } else { format!("{}; ", have_come(&new)) };
    let ranks = world.world_size();
    let of = if ranks < before.world_size() { format!(" of {}", before.world_size()) } else { String::new() };
    let go = match (ranks, of.is_empty()) {
        (1, true) => "rank goes on",
        (1, false) => "ranks goes on",
        _ => "ranks go on",
    };
    let layout = if layout.dp == ranks { String::new() } else { format!(" in the layout {layout}") };
    format!("{lost}{come}{ranks}{of} {go} after step {step}{layout}")
}

/// Wraps an error of this program so that it passes through the training loop.
pub(super) fn wrap_error(error: Error) -> girandole::Error {
    match error {
        Error::Comm(error) => error.into(),
        error => comm::carry(error).into(),
    }
}

/// Formats how good scores of documents, or of pairs, are; `link` is between a name and its number.
pub(super) fn show_measures<S: std::fmt::Display>(measures: &[(S, f64)], link: &str) -> String {
    measures.iter().map(|(name, measure)| format!(", {name}{link}{measure:.4}")).collect()
}

/// Formats what was found of pairs.
fn show_pairs(pairs: Option<&PreferenceReport>) -> String {
    let show = |pairs: &PreferenceReport| {
        format!("margin {:.4}, accuracy {:.1} %, ", pairs.margin(), 100.0 * pairs.accuracy)
    };
    pairs.map_or_else(String::new, show)
}

/// Formats the loss that balances experts.
fn show_balance(loss: Option<f64>) -> String {
    loss.map_or_else(String::new, |loss| format!("balance {loss:.4}, "))
}
