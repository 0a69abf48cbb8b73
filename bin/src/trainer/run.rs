//! A trainer at work as a rank of an experiment: resumed, logged, measured.

use candle_core::{Device, Tensor};
use candle_nn::{Optimizer, VarMap};
use report::RunSeries;
use sampler::Dataset;
use serde_json::Value;
use training::{Checkpoint, OptimizerState};

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, ElasticRanks};
use crate::rank::{Rank, Stage};
use crate::run_log::{LogConfig, RunLog};

use super::checkpoint::Extra;
use super::elastic::Run;
use super::keeper::INIT;
use super::{Keeper, Observer, Position, RunIdentity, Trainer, share};

/// A run of an experiment.
#[derive(Debug)]
pub struct RunConfig<'a> {
    /// Epochs in all, those before a resume counted.
    pub epochs: usize,
    /// Whether losses are kept for a report: of this run, or of one that goes on from its checkpoints.
    pub report: bool,
    /// Where checkpoints are, and whether to go on from one.
    pub checkpoints: &'a CheckpointOptions,
    /// What must be equal for that.
    pub run: RunIdentity,
    /// How many ranks there may be, where their number may change. Default: `None`.
    pub elastic: Option<ElasticRanks>,
}

impl<M, D, B, O, L> Trainer<M, D, B, O, L>
where
    D: Dataset + 'static,
    B: Send + 'static,
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    /// Trains as one rank, to the end: goes on from a checkpoint if that is asked for, keeps checkpoints, writes metrics, and
    /// measures. Gives the losses that this rank has kept for the report.
    ///
    /// # Errors
    /// A checkpoint that is damaged or of another run; those of [`train`](Self::train).
    pub fn run(
        &mut self,
        rank: &mut Rank,
        vars: &VarMap,
        config: &RunConfig<'_>,
        observer: &mut dyn Observer,
    ) -> Result<RunSeries> {
        let own = match rank.is_first() {
            true => find(config.checkpoints, &config.run)?,
            false => None,
        };
        let resumed = share::share(&*rank.comm, own, 0)?;
        let (first, steps_per_epoch) = (rank.is_first(), self.remaining());
        let mut metrics = rank.metrics.take();
        let log = LogConfig {
            run: None,
            keep: config.report,
            steps: config.epochs.saturating_mul(steps_per_epoch),
            muted: !first,
            at_once: config.elastic.is_some(),
        };
        // Where the first rank may be lost, each of the others can take its place.
        let log = (first || config.elastic.is_some()).then(|| RunLog::new(&log, metrics.as_mut()));
        let mut run = Run { vars, config, log, observer, watch: rank.stopwatch() };
        self.begin(resumed.as_ref(), first, &mut run)?;
        if rank.newcomer {
            // The others do so, too.
            self.ddp.check_parameters()?;
        }
        self.watch_door(rank, config.elastic);
        let begun = self.position().step;
        run.watch = rank.stopwatch();
        rank.stage = Stage::AtWork;
        self.train_elastic(rank, &mut run)?;
        let seconds = self.measure(rank, begun, &mut run)?;
        let series = run.log.map(RunLog::finish).unwrap_or_default();
        rank.metrics = metrics;
        let world_size = rank.comm.world_size();
        let name = format!("DDP, {world_size} {}", if world_size == 1 { "rank" } else { "ranks" });
        Ok(RunSeries { name, seconds, world_size, steps_per_epoch, ..series })
    }

    /// Goes on from a checkpoint, if there is one, and begins to keep others.
    fn begin(&mut self, resumed: Option<&Checkpoint>, first: bool, run: &mut Run<'_, '_>) -> Result<()> {
        let Run { vars, config, log, observer, .. } = run;
        if let Some(checkpoint) = resumed {
            self.restore(checkpoint, vars, log.as_mut(), *observer)?;
        }
        if let (Some(log), true, true) = (log, first, config.checkpoints.resumes()) {
            log.cut(self.position().epoch, self.position().batch)?;
            note(format_args!("{}", self.told(config, resumed)?));
        }
        if let (true, Some(checkpoints)) = (first, config.checkpoints.open()?) {
            let every = config.checkpoints.checkpoint_every;
            let mut keeper = Keeper::new(checkpoints, every, vars.clone(), config.run.clone());
            keeper.kept = resumed.map(|checkpoint| checkpoint.step as usize);
            self.keep_checkpoints(keeper);
        }
        Ok(())
    }

    /// Tells what was measured; the seconds of this rank's training loop, with those before it went on.
    fn measure(&mut self, rank: &mut Rank, begun: usize, run: &mut Run<'_, '_>) -> Result<f64> {
        let steps = self.position().step - begun;
        let measured = run.watch.measured();
        loop {
            rank.held = Some(self.held(steps, run.vars)?);
            let error = match rank.gather_measured(measured, steps) {
                Ok(seconds) => {
                    let seconds = seconds + run.log.as_ref().map_or(0.0, RunLog::before);
                    if let Some(log) = &mut run.log {
                        rank.write_summary(log.metrics(), seconds)?;
                    }
                    return Ok(seconds);
                }
                Err(error) => error,
            };
            self.recover(rank, run, error)?;
        }
    }

    /// What is to be said of a run that was asked to go on.
    fn told(&self, config: &RunConfig<'_>, resumed: Option<&Checkpoint>) -> Result<String> {
        let dir = config.checkpoints.dir().display();
        let Some(checkpoint) = resumed else {
            return Ok(format!("no checkpoint in {dir} yet: starting from the beginning"));
        };
        let Position { epoch, batch, step } = self.position();
        let (then, now) = (Extra::of(checkpoint)?.run.world_size, config.run.world_size);
        let dealt = match then == now {
            true => String::new(),
            false => format!(
                "; it was made with world size {then}, so what is left of the data is distributed again, and the numbers are \
                 those of neither"
            ),
        };
        Ok(format!("going on from {dir} at epoch {epoch}, batch {batch} (step {step}){dealt}"))
    }
}

/// The checkpoint that a run is to go on from, if it is to and there is one.
///
/// # Errors
/// One that is damaged, or of another run.
pub(crate) fn find(options: &CheckpointOptions, run: &RunIdentity) -> Result<Option<Checkpoint>> {
    let found = options.choose(
        |checkpoints| checkpoints.load_latest(&Device::Cpu),
        |checkpoints, folder| checkpoints.load(folder, &Device::Cpu),
    )?;
    if let Some(checkpoint) = &found {
        agree_on_command(&run.command, &checkpoint.extra, options)?;
        let extra = Extra::of(checkpoint)?;
        let at =
            Position { epoch: checkpoint.epoch as usize, batch: extra.batch, step: checkpoint.step as usize };
        agree(run, (&extra.run, at), options)?;
    }
    Ok(found)
}

/// Refuses a checkpoint of another of this program's commands, whatever else that keeps.
pub(crate) fn agree_on_command(own: &str, extra: &Value, options: &CheckpointOptions) -> Result<()> {
    // Where each rank writes a part, what the run keeps is below what the parts are.
    // Language models keep it among their settings.
    let places = ["/run/command", "/extra/run/command", "/extra/settings/command"];
    let command = places.iter().find_map(|at| extra.pointer(at)?.as_str());
    let Some(command) = command.filter(|command| *command != own) else { return Ok(()) };
    let (option, got) = options.source();
    let help = format!("that is of the command {command}, and this is {own}");
    Err(Error::Contradiction { option: option.into(), got: got.display().to_string(), help })
}

/// Refuses a checkpoint of another run, and one that is further than this run is to go.
pub(crate) fn agree(
    own: &RunIdentity,
    (saved, at): (&RunIdentity, Position),
    options: &CheckpointOptions,
) -> Result<()> {
    let dir = options.dir().display();
    if let Some((option, got, then)) = own.difference(saved) {
        let help = match option {
            INIT => format!(
                "the run in {dir} began with {then}, and goes on with the weights of its checkpoint; leave it out, or give \
                 another --checkpoint-dir"
            ),
            _ => {
                format!("the run in {dir} began with {then}; give that to go on, or another --checkpoint-dir")
            }
        };
        return Err(Error::Contradiction { option: option.into(), got: got.into(), help });
    }
    let Some((option, end)) = own.end.and_then(|end| end.passed(at)) else { return Ok(()) };
    let Position { epoch, batch, step } = at;
    let place = match option {
        "--steps" => format!("step {step}"),
        _ => format!("epoch {epoch}, batch {batch} (step {step})"),
    };
    let help = format!(
        "the checkpoint in {dir} is at {place} already; give more, --resume=CHECKPOINT with an earlier one, or another \
         --checkpoint-dir"
    );
    Err(Error::Contradiction { option: option.into(), got: end.to_string(), help })
}
