//! The runner of commands that train: the steps common to all of them, in the launcher and in the ranks.

use launch::SpawnConfig;
use report::metrics::MetricsWriter;
use report::trace::{self, TraceRecorder};
use report::{Report, command_line, fact, now_rfc3339};

use crate::command::Command;
use crate::console::note;
use crate::error::{Error, Result};
use crate::options::{CheckpointOptions, CommonOptions, DeviceKind};
use crate::rank::{self, Outcome, Rank, RankPhase};
use crate::start::{self, Start};
use crate::trainer::restart_before_first_step;
use crate::{live_page, option_values, outputs, same_options};

/// Runs a command that trains: in the launcher all of it, in a rank that rank's part. All checks come before any training.
///
/// # Errors
/// A wrong option, a file that cannot be used, a rank that failed.
pub fn run<C: Command>(command: &C) -> Result<()> {
    let ran = ops::Precision::from(command.common().precision).scope(|| run_in_precision(command));
    // A run that is refused leaves no empty folders.
    ran.inspect_err(|_| outputs::remove_made_folders())
}

fn run_in_precision<C: Command>(command: &C) -> Result<()> {
    let common = command.common();
    let elastic = command.elastic_options().unwrap_or_default();
    match Start::find(&common.ranks, C::NAME, elastic.world_size(C::WORLD_SIZE))? {
        Start::Launcher { world_size } => {
            trace::install(false)?;
            common.precision.note_products(common.device);
            elastic.check(world_size, &common.ranks)?;
            command.check(world_size)?;
            common.check()?;
            common.check_metrics_are_free()?;
            let here = launcher(command);
            let setup = here.setup()?;
            if let Some(checkpoints) = command.checkpoints() {
                checkpoints.check()?;
                // Rank 0 would find the same problem, but here it is reported in one line.
                if checkpoints.resumes() {
                    command.check_checkpoint(world_size)?;
                }
            }
            let mut metrics = begin_metrics(command)?;
            here.prepare(&setup, world_size, metrics.as_mut())?;
            // The ranks append to the same file.
            metrics.as_mut().map_or(Ok(()), MetricsWriter::flush)?;
            // The files that these variables name exist as long as `setup`, which otherwise only takes memory.
            let variables = here.for_ranks(&setup);
            let kept = (!variables.is_empty()).then_some(setup);
            let job = SpawnConfig { world_size, elastic: elastic.job(), ..SpawnConfig::default() };
            let outcome = start::spawn_with(C::NAME, job, common.ranks.grace, variables)
                .inspect_err(|_| common.report.as_deref().map_or((), live_page::stop_after_loss))?;
            drop(kept);
            finish(&here, outcome)?;
            if let Some(metrics) = metrics {
                metrics.finish();
            }
            Ok(())
        }
        Start::Rank { config, spawned: true } => {
            let in_rank = |source| Error::in_rank(config.rank, source);
            spawned(command, &config).or_else(rank::leave).map_err(in_rank)
        }
        Start::Rank { mut config, spawned: false } => {
            // Another launcher started this rank, so nothing has been checked yet.
            match command.elastic_options() {
                Some(elastic) => elastic.apply_to_rank(&mut config, &common.ranks)?,
                // This command cannot continue without a rank, even if the launcher is elastic.
                None => config.elastic = None,
            }
            command.check(config.world_size)?;
            common.check()?;
            let is_newcomer = config.elastic.as_ref().is_some_and(|elastic| elastic.newcomer);
            if !is_newcomer {
                common.check_metrics_are_free()?;
            }
            // For a newcomer, the folder already holds the checkpoints of the run that it joins.
            let check = if is_newcomer { CheckpointOptions::check_folder } else { CheckpointOptions::check };
            command.checkpoints().map_or(Ok(()), check)?;
            if config.rank == 0 {
                common.precision.note_products(common.device);
            }
            let in_rank = |source| Error::in_rank(config.rank, source);
            launched(command, &config).or_else(rank::leave).map_err(in_rank)
        }
    }
}

/// Returns the command for the launcher process: on the CPU if it needs no device, since an opened device keeps
/// some of the GPU's memory.
fn launcher<C: Command>(command: &C) -> C {
    let device = if C::PREPARES_ON_DEVICE { command.common().device } else { DeviceKind::Cpu };
    command.with_common(CommonOptions { device, ..command.common().clone() })
}

/// Runs a rank that this program started.
fn spawned<C: Command>(command: &C, config: &comm::TcpConfig) -> Result<()> {
    let common = command.common();
    let recorder = trace::install(common.trace.is_some())?;
    let first = Some(command.setup()?);
    let mut rank = Rank::join(common.ranks.backend, &common.device()?, config)?;
    // All ranks have the arguments of the process that started them.
    let set_up = |_: &Rank| command.setup();
    let trained = train(command, &mut rank, first, set_up, |rank, _| {
        // If the rank that writes the metrics may be lost, any other one may replace it.
        if rank.comm.rank() == command.reporter(config.world_size) || command.elastic().is_some() {
            rank.metrics = common.metrics.as_deref().map(MetricsWriter::append).transpose()?;
        }
        Ok(())
    })?;
    let hand_over = |rank: &Rank| start::hand_over(&rank.outcome(trained));
    conclude(command, config, &mut rank, recorder, hand_over)
}

/// Runs a rank that another launcher started: rank 0 also does the launcher's part.
fn launched<C: Command>(command: &C, config: &comm::TcpConfig) -> Result<()> {
    let common = command.common();
    let recorder = trace::install(common.trace.is_some())?;
    // The ranks of a running job do not wait while a rank that joins them reads its data.
    let is_newcomer = config.elastic.as_ref().is_some_and(|elastic| elastic.newcomer);
    let first = if is_newcomer { Some(command.setup()?) } else { None };
    let mut rank = Rank::join(common.ranks.backend, &common.device()?, config)?;
    let mut is_prepared = false;
    let set_up = |rank: &Rank| agreed_setup(command, rank);
    let trained = train(command, &mut rank, first, set_up, |rank, setup| {
        // On a restart, the first attempt's writer is dropped first: if unused, it puts the lines of an earlier run
        // back.
        rank.metrics = None;
        let mut metrics = None;
        // A newcomer continues in the file that the other ranks have begun.
        if !rank.newcomer && rank.comm.rank() == command.reporter(config.world_size) {
            metrics = begin_metrics(command)?;
        }
        if !rank.newcomer && rank.phase < RankPhase::Prepared {
            rank.first_alone(config.timeout, || {
                if !is_prepared {
                    command.prepare(setup, config.world_size, metrics.as_mut())?;
                    is_prepared = true;
                }
                Ok(())
            })?;
            rank.phase = RankPhase::Prepared;
        }
        if command.elastic().is_some() && metrics.is_none() {
            // Rank 0 has begun the file, and another rank may replace it.
            metrics = common.metrics.as_deref().map(MetricsWriter::append).transpose()?;
        }
        rank.metrics = metrics;
        Ok(())
    })?;
    let report = |rank: &Rank| finish(command, rank.outcome(trained));
    conclude(command, config, &mut rank, recorder, report)?;
    if let Some(metrics) = rank.metrics.take() {
        metrics.finish();
    }
    Ok(())
}

/// Creates data and weights, once all ranks, which another launcher has started, agree on their options. That comes before
/// anything is printed, so that incompatible ranks are reported early.
fn agreed_setup<C: Command>(command: &C, rank: &Rank) -> Result<C::Setup> {
    if rank.newcomer {
        // The ranks of the running job tell it their options with their state.
        return command.setup();
    }
    let world = &*rank.comm;
    same_options::agree_on_options(world, C::JOINT, || {
        let own = command.settings(world.world_size());
        command.common().settings(command.checkpoints()).into_iter().chain(own).collect()
    })?;
    let read = || {
        let setup = command.setup()?;
        Ok((command.contents(&setup)?, setup))
    };
    let peer_failed = |rank, reason| Error::from(girandole::Error::PeerFailed { rank, reason });
    let (contents, setup) = strategy::all_agree_with([world], read(), peer_failed)?;
    same_options::agree(world, &contents)?;
    Ok(setup)
}

/// Prepares and trains; does so again if ranks are lost before the first step and the others start from the beginning. The
/// setup of the first start may be given; `set_up` creates those of the others.
fn train<C: Command>(
    command: &C,
    rank: &mut Rank,
    mut first: Option<C::Setup>,
    set_up: impl Fn(&Rank) -> Result<C::Setup>,
    mut prepare: impl FnMut(&mut Rank, &C::Setup) -> Result<()>,
) -> Result<C::Trained> {
    loop {
        let setup = first.take().map_or_else(|| set_up(rank), Ok);
        let trained = setup.and_then(|setup| {
            prepare(rank, &setup)?;
            command.train(setup, rank)
        });
        match trained {
            Ok(trained) => return Ok(trained),
            Err(error) => {
                if let (Error::Stopped { .. }, true) = (&error, rank.is_first()) {
                    note(format_args!("{error}"));
                }
                restart_before_first_step(rank, command.elastic(), error)?;
            }
        }
    }
}

/// Ends the run on this rank: the first one writes the trace and calls `report`.
fn conclude<C: Command>(
    command: &C,
    config: &comm::TcpConfig,
    rank: &mut Rank,
    recorder: Option<TraceRecorder>,
    report: impl FnOnce(&Rank) -> Result<()>,
) -> Result<()> {
    // The number at the start: after a loss, another rank may have the place of this one in the group.
    let number = rank.comm.world_ranks()[rank.comm.rank()];
    let trace = recorder.zip(command.common().trace.as_deref());
    let trace = trace.map(|(recorder, path)| (recorder.finish(number, &comm::internal::host_name()), path));
    rank.conclude(command.elastic(), config.timeout, trace, report)
}

/// Opens the file of `--metrics`: empty, unless a run goes on from a checkpoint or is started again.
fn begin_metrics<C: Command>(command: &C) -> Result<Option<MetricsWriter>> {
    let goes_on = match command.checkpoints() {
        Some(checkpoints) if checkpoints.resumes() => {
            launch::restarts() > 0 || checkpoints.has_checkpoint_to_resume()?
        }
        _ => false,
    };
    let begin = if goes_on { MetricsWriter::append } else { MetricsWriter::create };
    Ok(command.common().metrics.as_deref().map(begin).transpose()?)
}

fn finish<C: Command>(command: &C, outcome: Outcome<C::Trained>) -> Result<()> {
    command.conclude(&outcome)?;
    let common = command.common();
    let Some(path) = &common.report else { return Ok(()) };
    let mut facts = vec![
        fact("ranks", outcome.ranks.len()),
        fact("backend", outcome.backend.clone()),
        fact("device", outcome.device.clone()),
        fact("seed", common.seed),
    ];
    let ranks = outcome.rank_times();
    let own = command.report(outcome);
    facts.extend(own.facts);
    facts.push(fact("version", env!("CARGO_PKG_VERSION")));
    let report = Report {
        title: C::NAME.into(),
        command_line: command_line(),
        date: now_rfc3339(),
        host: comm::internal::host_name(),
        facts,
        ranks,
        options: option_values::all(),
        ..own
    };
    Ok(report.write(path)?)
}
