//! Running a trainer as a rank of an experiment: resume, checkpoints, log and measurements.

mod elastic;

use comm::{Operation, Stats};
use girandole::trainer::{StopCheck, claim_checkpoints};
use report::RunSeries;
use report::metrics::MemoryUse;
use training::{Checkpoints, Contents};

use crate::console::note;
use crate::error::Result;
use crate::interrupt::StopOnSignal;
use crate::live_page::LivePage;
use crate::options::{CheckpointOptions, ElasticRanks};
use crate::rank::{Rank, RankPhase, Stopwatch};
use crate::resume::first_choice;
use crate::run_log::{LogConfig, RunLog};

use super::checkpoint::RunState;
use super::schedule::EVERY;
use super::{CheckpointSchedule, Logged, Observer, Position, RunEnd, RunIdentity, Source, Strategy, Trainer};

pub(super) use elastic::NewcomerCheck;

/// Returns the checkpoint that a run resumes from, if any.
pub type Find<'a> = Box<dyn Fn(&RunIdentity) -> Result<Option<Contents>> + 'a>;

/// Returns the page that is written while the run goes on, if one is wanted; its argument is what is known of the run at its
/// start.
pub type MakePage<'a> = Box<dyn Fn(RunSeries) -> Option<LivePage> + 'a>;

/// Configuration of a run of an experiment.
pub struct RunConfig<'a> {
    /// Name of the run, if the experiment has several.
    pub name: Option<&'static str>,
    /// When it ends.
    pub end: RunEnd,
    /// Whether losses are kept for a report: of this run, or of one resumed from its checkpoints.
    pub report: bool,
    /// Checkpoint options.
    pub checkpoints: CheckpointOptions,
    /// Identity that a checkpoint must match.
    pub run: RunIdentity,
    /// Finds the checkpoint to resume from, if resuming is requested and one exists.
    pub find: Find<'a>,
    /// Allowed numbers of ranks, if the number may change. Default: `None`.
    pub elastic: Option<ElasticRanks>,
    /// The rank that prints and writes metrics.
    pub reporter: usize,
    /// Makes the page that is written while the run goes on, if one is wanted, from what is known of the run at its start.
    pub page: MakePage<'a>,
}

/// The state of a run outside its trainer.
struct Run<'a, 'l> {
    config: &'a RunConfig<'a>,
    logged: Logged<'a, 'l>,
    watch: Stopwatch,
}

/// Result of a run.
#[derive(Debug)]
pub struct RunResult {
    /// The losses, if this rank keeps them for the report.
    pub series: RunSeries,
    /// Time of this rank's training loop, in seconds, without the time before a resume.
    pub seconds: f64,
    /// Steps in that time.
    pub steps: usize,
    /// Bytes of model state that this rank held, and bytes sent per step.
    pub held: MemoryUse,
}

/// Claims the folder of checkpoints for this run, if they are kept: as long as what is returned exists on any rank.
fn claim(rank: &Rank, config: &RunConfig<'_>) -> Result<Option<Checkpoints>> {
    let Some(checkpoints) = config.checkpoints.open()? else { return Ok(None) };
    match rank.newcomer {
        true => checkpoints.share_claim()?,
        false => claim_checkpoints(&*rank.comm, &checkpoints)?,
    }
    Ok(Some(checkpoints))
}

impl<S: Strategy, D: Source<Batch = S::Batch>> Trainer<S, D> {
    /// Trains as one rank to the end: resumes from a checkpoint if requested, writes checkpoints and metrics, and
    /// measures.
    ///
    /// # Errors
    /// A checkpoint that is damaged or of another run; those of [`train`](Self::train).
    pub fn run(
        &mut self,
        rank: &mut Rank,
        config: &RunConfig<'_>,
        observer: &mut dyn Observer,
    ) -> Result<RunResult> {
        self.run_and(rank, config, observer, |_, _| Ok(())).map(|(ran, ())| ran)
    }

    /// Like [`run`](Self::run), with work of all ranks after training, such as saving the model. If a rank is lost
    /// meanwhile, and the run can go on without it, the remaining ranks do the work again.
    ///
    /// # Errors
    /// Those of [`run`](Self::run), and of the work.
    pub fn run_and<T>(
        &mut self,
        rank: &mut Rank,
        config: &RunConfig<'_>,
        observer: &mut dyn Observer,
        work: impl Fn(&S, &Rank) -> Result<T>,
    ) -> Result<(RunResult, T)> {
        // Until all is done: other runs must not write there meanwhile.
        let _claimed = claim(rank, config)?;
        let found = self.found(rank, config)?;
        let (prints, per_epoch) = (rank.comm.rank() == config.reporter, self.source.remaining(self.at));
        let (steps, steps_per_epoch) = match config.end {
            RunEnd::Epochs(epochs) => (epochs.saturating_mul(per_epoch), per_epoch),
            RunEnd::Steps(steps) => (steps, 0),
        };
        let (keep, at_once) = (config.report, config.elastic.is_some());
        let log = LogConfig { run: config.name, keep, steps, muted: !prints, at_once };
        let mut metrics = rank.metrics.take();
        // If the first rank may be lost, any other one may have to replace it.
        let page = || {
            let world_size = rank.comm.world_size();
            let name = self.strategy.name(world_size);
            (config.page)(RunSeries { name, world_size, steps_per_epoch, ..RunSeries::default() })
        };
        let log = (prints || at_once).then(|| RunLog::new(&log, metrics.as_mut()).with_page(page()));
        let mut run = Run { config, logged: Logged::new(log, observer), watch: rank.stopwatch() };
        self.begin(found.as_ref(), rank, &mut run)?;
        if let (true, Some(model)) = (rank.newcomer, self.strategy.whole()) {
            // Collective: the other ranks call it when they send the state.
            model.check()?;
        }
        self.enable_newcomers(rank, config.elastic);
        let signals = self.stop_on_signal(rank, config);
        let (begun, before) = (self.at.step, self.strategy.stats());
        run.watch = rank.stopwatch_over(&self.strategy.groups());
        rank.phase = RankPhase::AtWork;
        self.train_elastic(rank, &mut run)?;
        // From here on a signal ends the rank at once.
        drop(signals);
        let (ran, done) = self.end(rank, begun, before, &mut run, work)?;
        let series = run.logged.finish();
        rank.metrics = metrics;
        let world_size = rank.comm.world_size();
        let (name, seconds) = (self.strategy.name(world_size), ran.series.seconds);
        let series = RunSeries { name, seconds, world_size, steps_per_epoch, ..series };
        Ok((RunResult { series, ..ran }, done))
    }

    /// Lets signals stop the run with a checkpoint, if it keeps any, until the returned value is dropped.
    fn stop_on_signal(&mut self, rank: &Rank, config: &RunConfig<'_>) -> Option<StopOnSignal> {
        let signals = config.checkpoints.stop_on_signal()?;
        let fewest = config.elastic.map(|elastic| elastic.min);
        let check = StopCheck::new(signals.flag(), rank.comm.clone(), fewest);
        self.stop = Some((check, config.checkpoints.dir().to_path_buf()));
        Some(signals)
    }

    /// Returns the checkpoint to resume from, if resuming is requested and one exists, on the ranks that read it: on rank 0, or
    /// if each has a part of the model, on all ranks, which must call it. Rank 0 chooses, so that all take the same one.
    fn found(&mut self, rank: &Rank, config: &RunConfig<'_>) -> Result<Option<Contents>> {
        let own = || if rank.is_first() { (config.find)(&config.run) } else { Ok(None) };
        match self.strategy.whole() {
            Some(_) => own(),
            None => first_choice(&config.checkpoints, rank, own),
        }
    }

    /// Resumes from a checkpoint, if one was found, and enables new checkpoints.
    fn begin(&mut self, found: Option<&Contents>, rank: &Rank, run: &mut Run<'_, '_>) -> Result<()> {
        let Run { config, logged, .. } = run;
        let is_whole = self.strategy.whole().is_some();
        if let Some(contents) = found {
            self.strategy.load(contents)?;
        }
        let mut state = found.map(RunState::read).transpose()?;
        if is_whole {
            // Rank 0 reads it for all, since the folder need not exist on every host; or a running job sends its state.
            state = self.share(&*rank.comm, state, 0, !rank.is_first())?;
        }
        if let Some(job) = state.as_mut().and_then(|state| state.job.take()) {
            // A newcomer with other options leaves, and the others go on without it.
            job.check(&*rank.comm)?;
        }
        let then = state.map(|state| self.set_state(state, logged)).transpose()?;
        let log = logged.log.as_mut().filter(|log| !log.is_muted());
        if let (Some(log), true) = (log, config.checkpoints.resumes()) {
            log.cut(self.at.epoch, self.at.batch)?;
            note(format_args!("{}", self.resume_note(config, then)?));
        }
        if rank.is_first() || !is_whole {
            self.keep(config, config.run.clone())?;
        }
        if let (Some(_), Some(schedule)) = (then, &mut self.schedule) {
            schedule.last = Some(self.at.step);
        }
        Ok(())
    }

    /// Enables checkpoints, if requested.
    fn keep(&mut self, config: &RunConfig<'_>, run: RunIdentity) -> Result<()> {
        let Some(checkpoints) = config.checkpoints.open()? else { return Ok(()) };
        let every = match config.end {
            RunEnd::Epochs(_) => config.checkpoints.checkpoint_every,
            RunEnd::Steps(_) => Some(config.checkpoints.checkpoint_every.unwrap_or(EVERY)),
        };
        self.keep_checkpoints(CheckpointSchedule::new(checkpoints, every, run));
        Ok(())
    }

    /// Gathers the measurements, does the work after training, and writes the summary, whose time includes the seconds
    /// before a resume. In an elastic run, a rank that is done waits until all are: if one is lost before, the others do
    /// it again together.
    fn end<T>(
        &mut self,
        rank: &mut Rank,
        begun: usize,
        before: Stats,
        run: &mut Run<'_, '_>,
        work: impl Fn(&S, &Rank) -> Result<T>,
    ) -> Result<(RunResult, T)> {
        let steps = self.at.step - begun;
        let measured = self.strategy.measured(run.watch.measured(), &before);
        let (seconds, held, done) = loop {
            let sent = (self.strategy.stats().bytes_sent - before.bytes_sent) as f64 / steps.max(1) as f64;
            let held = MemoryUse { sent, ..self.strategy.held()? };
            rank.held = Some(held);
            let done = rank
                .gather_measured(measured, steps)
                .and_then(|seconds| Ok((seconds, held, work(&self.strategy, rank)?)));
            let done = match done {
                Ok(done) => done,
                Err(error) => {
                    self.recover(rank, run, error)?;
                    continue;
                }
            };
            if run.config.elastic.is_some()
                && let Err(error) = rank.comm.run(Operation::Barrier)
            {
                self.recover(rank, run, error.into())?;
                if rank.phase < RankPhase::Trained {
                    continue;
                }
            }
            break done;
        };
        rank.phase = RankPhase::Trained;
        let whole = seconds + run.logged.log.as_ref().map_or(0.0, RunLog::before);
        if let Some(log) = &mut run.logged.log {
            rank.write_summary(run.config.name, log.metrics(), whole)?;
        }
        let series = RunSeries { seconds: whole, ..RunSeries::default() };
        Ok((RunResult { series, seconds, steps, held }, done))
    }

    /// Trains to the end while ranks are lost and admitted.
    fn train_elastic(&mut self, rank: &mut Rank, run: &mut Run<'_, '_>) -> Result<()> {
        loop {
            let outcome = match self.is_paused() {
                true => self.admit_newcomers(rank, run),
                false => self.train(run.config.end, &mut run.logged),
            };
            match outcome {
                Ok(()) if self.is_paused() || !run.config.end.is_reached(self.at) => {}
                Ok(()) => return Ok(()),
                Err(error) => self.recover(rank, run, error)?,
            }
        }
    }

    /// Formats the note about a resume; `then` is the number of ranks of the run that wrote the checkpoint, `None`
    /// without one.
    fn resume_note(&self, config: &RunConfig<'_>, then: Option<usize>) -> Result<String> {
        let Some(then) = then else {
            let dir = config.checkpoints.dir().display();
            return Ok(format!("no checkpoint in {dir} yet: starting from the beginning"));
        };
        let from = config.checkpoints.resumed_folder()?;
        let from = from.display();
        let changed = if then == config.run.world_size { String::new() } else { self.source.changed(then) };
        let Position { epoch, batch, step } = self.at;
        Ok(match config.end {
            RunEnd::Epochs(_) => {
                format!("going on from {from} at epoch {epoch}, batch {batch} (step {step}){changed}")
            }
            RunEnd::Steps(_) => format!("going on from {from} at step {step}{changed}"),
        })
    }
}
