//! What every experiment has in common: the order of its parts, in a launcher and in a rank.

mod usual;

use std::ffi::OsString;

use report::metrics::MetricsWriter;
use report::{Report, command_line, fact, now_rfc3339, trace};
use serde::Serialize;
use serde::de::DeserializeOwned;
use training::Contents;

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::{
    CheckpointOptions, CommonOptions, DeviceKind, ElasticOptions, ElasticRanks, PrecisionOption,
    keeps_losses, offer,
};
use crate::rank::{Outcome, Rank, Stage};
use crate::start::{self, Start, host_name};
use crate::trainer::{RunConfig, RunEnd, RunIdentity, begin_anew, find};

pub(crate) use usual::options_of;

/// One tutorial's experiment. [`run`] calls the parts in the order in which they stand here.
pub trait Experiment: Sized {
    /// The command's name.
    const NAME: &'static str;
    /// Ranks on the CPU, unless told otherwise.
    const WORLD_SIZE: usize;
    /// Whether [`alone`](Self::alone) works with tensors on the device. Where it does not, the launcher leaves GPUs to its ranks.
    const ALONE_ON_DEVICE: bool = false;
    /// What a process begins with, the same in each: data and initial weights.
    type Setup;
    /// What one process finds out before there are ranks; `()` where the tutorial does nothing then.
    type Alone;
    /// What a rank has learnt; rank 0's is kept.
    type Trained: Serialize + DeserializeOwned;

    /// The options that all experiments take.
    fn common(&self) -> &CommonOptions;

    /// The same with other ones.
    fn with_common(&self, common: CommonOptions) -> Self;

    /// Its options of checkpoints, where it keeps any.
    fn checkpoints(&self) -> Option<&CheckpointOptions> {
        None
    }

    /// How many ranks it may have, where their number may change while it runs.
    fn elastic(&self) -> Option<ElasticRanks> {
        self.elastic_options().and_then(|options| options.ranks())
    }

    /// Its options of that, where it has any.
    fn elastic_options(&self) -> Option<ElasticOptions> {
        None
    }

    /// What the rank has of [`alone`](Self::alone) that takes the first one's place when that is lost. `None` where the number of
    /// ranks does not change.
    fn stand_in(&self) -> Option<Self::Alone> {
        None
    }

    /// Options of its own, with their values, that must be equal for a run to go on from a checkpoint.
    fn settings(&self, world_size: usize) -> Vec<(&'static str, String)> {
        let _ = world_size;
        Vec::new()
    }

    /// Where its training ends, if it trains.
    fn end(&self) -> Option<RunEnd> {
        None
    }

    /// How many of these ranks have different data.
    fn copies(&self, world_size: usize) -> usize {
        world_size
    }

    /// What must be equal for a run to go on from a checkpoint.
    fn identity(&self, world_size: usize) -> RunIdentity {
        let settings =
            self.common().settings(self.checkpoints()).into_iter().chain(self.settings(world_size));
        RunIdentity { end: self.end(), ..RunIdentity::new(Self::NAME, self.copies(world_size), settings) }
    }

    /// How it trains, as one of its ranks.
    fn run_config(&self, rank: &Rank) -> RunConfig<'_> {
        let world_size = rank.comm.world_size();
        let checkpoints = self.checkpoints().cloned().unwrap_or_default();
        RunConfig {
            name: None,
            end: self.end().unwrap_or(RunEnd::Steps(0)),
            report: keeps_losses(self.common(), &checkpoints),
            checkpoints,
            run: self.identity(world_size),
            find: Box::new(move |run| self.find_checkpoint(run, world_size)),
            elastic: self.elastic(),
            reporter: self.reporter(world_size),
        }
    }

    /// The checkpoint that this run is to go on from, if that is asked for and there is one.
    ///
    /// # Errors
    /// One whose manifest is damaged, or of another run.
    fn find_checkpoint(&self, run: &RunIdentity, world_size: usize) -> Result<Option<Contents>> {
        let found = self.checkpoints().map_or(Ok(None), |checkpoints| find(checkpoints, run))?;
        found.iter().try_for_each(|contents| self.check_left(contents, world_size))?;
        Ok(found)
    }

    /// Looks whether a run can go on from there with so many ranks, in what is left of the data.
    ///
    /// # Errors
    /// It cannot.
    fn check_left(&self, contents: &Contents, world_size: usize) -> Result<()> {
        let _ = (contents, world_size);
        Ok(())
    }

    /// Looks whether there is a checkpoint to go on from, if that is asked for, and whether it is whole and of this run.
    ///
    /// # Errors
    /// One that is damaged, or of another run.
    fn check_checkpoint(&self, world_size: usize) -> Result<()> {
        let Some(contents) = self.find_checkpoint(&self.identity(world_size), world_size)? else {
            return Ok(());
        };
        contents.files.keys().try_for_each(|name| contents.check(name).map_err(offer))
    }

    /// The rank that prints, and writes `--metrics`.
    fn reporter(&self, _world_size: usize) -> usize {
        0
    }

    /// Checks the experiment's own options, as far as that takes no work.
    ///
    /// # Errors
    /// The first option that cannot be used.
    fn check(&self, world_size: usize) -> Result<()>;

    /// Makes or reads data and weights. Nothing has been printed before, and nothing is written.
    ///
    /// # Errors
    /// A file that cannot be used.
    fn setup(&self) -> Result<Self::Setup>;

    /// What one process does before the ranks begin.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn alone(
        &self,
        setup: Self::Setup,
        world_size: usize,
        metrics: Option<&mut MetricsWriter>,
    ) -> Result<Self::Alone>;

    /// What ranks are told through their environment that this process starts on this machine.
    fn for_ranks(&self, alone: &Self::Alone) -> Vec<(OsString, OsString)> {
        let _ = alone;
        Vec::new()
    }

    /// What each rank does.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn train(&self, setup: Self::Setup, rank: &mut Rank) -> Result<Self::Trained>;

    /// Prints the end of the story.
    ///
    /// # Errors
    /// Standard output that cannot be written.
    fn conclude(&self, alone: &Self::Alone, outcome: &Outcome<Self::Trained>) -> Result<()> {
        let _ = (alone, outcome);
        Ok(())
    }

    /// What `--report` shows of it: runs, speed-up, and facts beyond those of every experiment.
    fn report(&self, alone: Self::Alone, outcome: Outcome<Self::Trained>) -> Report;
}

/// Runs an experiment: all of it, or this rank's part. Everything that can be checked is checked before any training.
///
/// # Errors
/// A wrong option, a file that cannot be used, a rank that failed.
pub fn run<E: Experiment>(experiment: &E) -> Result<()> {
    training::autocast(experiment.common().precision.into(), || run_in_precision(experiment))
}

fn run_in_precision<E: Experiment>(experiment: &E) -> Result<()> {
    let common = experiment.common();
    let elastic = experiment.elastic_options().unwrap_or_default();
    match Start::find(&common.ranks, E::NAME, elastic.world_size(E::WORLD_SIZE))? {
        Start::Launcher { world_size } => {
            trace::install(false)?;
            if common.precision != PrecisionOption::F32 {
                let precision = training::Precision::from(common.precision);
                note(format_args!("matrix products are computed {}", precision.products()));
            }
            elastic.check(world_size, &common.ranks)?;
            experiment.check(world_size)?;
            common.check()?;
            let here = launcher(experiment);
            let setup = here.setup()?;
            if let Some(checkpoints) = experiment.checkpoints() {
                checkpoints.check()?;
                // Rank 0 finds the same, but here it is told in one line.
                if checkpoints.resumes() {
                    experiment.check_checkpoint(world_size)?;
                }
            }
            let mut metrics = begin_metrics(experiment)?;
            let alone = here.alone(setup, world_size, metrics.as_mut())?;
            // The ranks go on in the same file.
            metrics.as_mut().map_or(Ok(()), MetricsWriter::flush)?;
            let told = here.for_ranks(&alone);
            finish(experiment, alone, start::spawn_told(E::NAME, world_size, elastic.job(), told)?)?;
            if let Some(metrics) = metrics {
                metrics.finish();
            }
            Ok(())
        }
        Start::Rank { config, spawned: true } => {
            let in_rank = |source| Error::in_rank(config.rank, source);
            spawned(experiment, &config).map_err(in_rank)
        }
        Start::Rank { mut config, spawned: false } => {
            // Another launcher started this rank, so nobody has checked anything yet.
            match experiment.elastic_options() {
                Some(elastic) => elastic.join(&mut config, &common.ranks)?,
                // Without a rank the others cannot go on, whatever the launcher says.
                None => config.elastic = None,
            }
            experiment.check(config.world_size)?;
            common.check()?;
            let is_newcomer = config.elastic.as_ref().is_some_and(|elastic| elastic.newcomer);
            // In the folder of a run that it joins are that run's checkpoints.
            let check = if is_newcomer { CheckpointOptions::check_folder } else { CheckpointOptions::check };
            experiment.checkpoints().map_or(Ok(()), check)?;
            let in_rank = |source| Error::in_rank(config.rank, source);
            launched(experiment, &config).map_err(in_rank)
        }
    }
}

/// What the process does that starts the ranks: without a device that it does not need, of which it would keep some memory.
fn launcher<E: Experiment>(experiment: &E) -> E {
    let device = if E::ALONE_ON_DEVICE { experiment.common().device } else { DeviceKind::Cpu };
    experiment.with_common(CommonOptions { device, ..experiment.common().clone() })
}

/// A rank that this program has started.
fn spawned<E: Experiment>(experiment: &E, config: &comm::TcpConfig) -> Result<()> {
    let common = experiment.common();
    let recorder = trace::install(common.trace.is_some())?;
    let setup = experiment.setup()?;
    let mut rank = Rank::join(common.ranks.backend, &common.device()?, config)?;
    let trained = train(experiment, setup, &mut rank, |rank| {
        // Where the rank that writes them may be lost, any other one may take its place.
        if rank.comm.rank() == experiment.reporter(config.world_size) || experiment.elastic().is_some() {
            rank.metrics = common.metrics.as_deref().map(MetricsWriter::append).transpose()?;
        }
        Ok(())
    })?;
    rank.write_trace(recorder, common.trace.as_deref())?;
    if rank.is_first() { start::hand_over(&rank.outcome(trained)) } else { Ok(()) }
}

/// A rank that another launcher has started: rank 0 does the launcher's part as well.
fn launched<E: Experiment>(experiment: &E, config: &comm::TcpConfig) -> Result<()> {
    let common = experiment.common();
    let recorder = trace::install(common.trace.is_some())?;
    let setup = experiment.setup()?;
    // Before anything is printed, so that ranks that do not fit together find out early.
    let mut rank = Rank::join(common.ranks.backend, &common.device()?, config)?;
    let mut alone = None;
    let trained = train(experiment, setup, &mut rank, |rank| {
        // Where the job begins anew: what the first try has begun gives the lines of an earlier run their place back.
        rank.metrics = None;
        let mut metrics = None;
        // A rank that comes later goes on where the others are, in the file that they have begun.
        if !rank.newcomer && rank.comm.rank() == experiment.reporter(config.world_size) {
            metrics = begin_metrics(experiment)?;
        }
        if !rank.newcomer && rank.stage < Stage::Told {
            rank.first_alone(config.timeout, || {
                if alone.is_none() {
                    let setup = experiment.setup()?;
                    alone = Some(experiment.alone(setup, config.world_size, metrics.as_mut())?);
                }
                Ok(())
            })?;
            rank.stage = Stage::Told;
        }
        if experiment.elastic().is_some() && metrics.is_none() {
            // The first rank has begun them, and another one may take its place.
            metrics = common.metrics.as_deref().map(MetricsWriter::append).transpose()?;
        }
        rank.metrics = metrics;
        Ok(())
    })?;
    rank.write_trace(recorder, common.trace.as_deref())?;
    if let Some(metrics) = rank.metrics.take() {
        metrics.finish();
    }
    match alone.or_else(|| rank.is_first().then(|| experiment.stand_in()).flatten()) {
        Some(alone) => finish(experiment, alone, rank.outcome(trained)),
        None => Ok(()),
    }
}

/// Prepares and trains; again where ranks are lost before the first step and the others begin anew.
fn train<E: Experiment>(
    experiment: &E,
    mut setup: E::Setup,
    rank: &mut Rank,
    mut prepare: impl FnMut(&mut Rank) -> Result<()>,
) -> Result<E::Trained> {
    loop {
        let error = match prepare(rank).and_then(|()| experiment.train(setup, rank)) {
            Ok(trained) => return Ok(trained),
            Err(error) => error,
        };
        begin_anew(rank, experiment.elastic(), error)?;
        setup = experiment.setup()?;
    }
}

/// The file of `--metrics`: empty, unless a run goes on in it.
fn begin_metrics<E: Experiment>(experiment: &E) -> Result<Option<MetricsWriter>> {
    let resumes = experiment.checkpoints().is_some_and(CheckpointOptions::resumes);
    let begin = if resumes { MetricsWriter::append } else { MetricsWriter::create };
    Ok(experiment.common().metrics.as_deref().map(begin).transpose()?)
}

fn finish<E: Experiment>(experiment: &E, alone: E::Alone, outcome: Outcome<E::Trained>) -> Result<()> {
    experiment.conclude(&alone, &outcome)?;
    let common = experiment.common();
    let Some(path) = &common.report else { return Ok(()) };
    let mut facts = vec![
        fact("ranks", outcome.ranks.len()),
        fact("backend", outcome.backend.clone()),
        fact("device", outcome.device.clone()),
        fact("seed", common.seed),
    ];
    let ranks = outcome.rank_times();
    let own = experiment.report(alone, outcome);
    facts.extend(own.facts);
    facts.push(fact("version", env!("CARGO_PKG_VERSION")));
    let report = Report {
        title: E::NAME.into(),
        command_line: command_line(),
        date: now_rfc3339(),
        host: host_name(),
        facts,
        ranks,
        ..own
    };
    Ok(report.write(path)?)
}
