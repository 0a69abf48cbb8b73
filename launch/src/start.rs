//! Starts the processes of the ranks, and owns them.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, PipeReader, PipeWriter};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use comm::launcher::{LISTENER, LISTENER_STDIN};
use comm::{Error, Result};
use rustix::process::{Pid, Signal, kill_process};

use super::environment::{Job, NEWCOMER};
use super::event::Event;
use super::master::Master;
use super::reaper::Reaper;
use super::reserved::ReservedPort;
use super::signals::FORWARDED_SIGNALS;
use super::watch::Watch;
use crate::platform::{program, tie, unblocked};
use crate::{ExitKind, SpawnConfig};

/// The process of one rank.
pub(super) struct Worker {
    /// Global rank.
    pub(super) rank: usize,
    child: Child,
    /// Kills the process if the launcher is killed.
    reaper: Option<Arc<Reaper>>,
    pub(super) pid: u32,
    /// Exit status, once it was reaped.
    pub(super) ended: Option<ExitKind>,
    /// Whether the launcher has told it to end.
    pub(super) asked_to_end: bool,
    /// Whether it was started in place of a lost rank.
    is_newcomer: bool,
    /// Whether it has joined the group.
    pub(super) has_met: bool,
    /// Whether the group excludes it.
    pub(super) left_behind: bool,
}

impl Worker {
    /// Whether the rank is not a member of the group: excluded, or started later and not joined yet. The others do not
    /// wait for it.
    pub(super) fn is_outside_group(&self) -> bool {
        self.left_behind || self.is_newcomer && !self.has_met
    }

    /// Warns that a rank outside of the group is ended, as the members are done.
    pub(super) fn warn_ended(&self) {
        let Self { rank, pid, left_behind, .. } = self;
        let reason = match left_behind {
            true => "the others have left it behind, and are done",
            false => "it had not joined the others when they were done",
        };
        tracing::warn!("rank {rank} (pid {pid}) is ended: {reason}");
    }

    /// Sends a signal if the process has not been reaped. Until then its id cannot be reused.
    pub(super) fn send(&self, signal: Signal) {
        if self.ended.is_none() {
            // Fails only if the process has just ended or has changed its user; then nothing can be done about it.
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
    }

    /// Waits until the process has ended, and records its exit status.
    pub(super) fn reap(&mut self) -> io::Result<ExitKind> {
        self.reaper.iter().for_each(|reaper| reaper.remove(Pid::from_child(&self.child)));
        let status = ExitKind::from(self.child.wait()?);
        self.ended = Some(status);
        Ok(status)
    }
}

/// The processes of a job on this node, by local rank. Dropping it kills those that still run.
pub(super) struct Workers {
    pub(super) list: Vec<Worker>,
    watch: Watch,
    reaper: Option<Arc<Reaper>>,
    /// Reserves the rendezvous port, if rank 0 does not inherit its listener.
    _reserved: Option<ReservedPort>,
    /// Pipes for ranks that may be started later.
    spares: VecDeque<Spare>,
    /// Set if some processes cannot be ended: they are not waited for any more.
    pub(super) given_up: bool,
}

impl Workers {
    pub(super) fn running(&self) -> usize {
        self.running_workers().count()
    }

    pub(super) fn running_workers(&self) -> impl Iterator<Item = &Worker> {
        self.list.iter().filter(|worker| worker.ended.is_none())
    }

    /// Number of running ranks that are members of the group.
    pub(super) fn at_work(&self) -> usize {
        self.running_workers().filter(|worker| !worker.is_outside_group()).count()
    }

    /// Number of running replacement ranks that have not joined the group yet.
    pub(super) fn joining(&self) -> usize {
        let comes = |worker: &&Worker| worker.is_newcomer && !worker.has_met && !worker.left_behind;
        self.running_workers().filter(comes).count()
    }

    /// Records that this local rank has joined the group, which excludes the ranks `without` of the job.
    pub(super) fn have_met(&mut self, local_rank: usize, without: &[usize]) {
        if let Some(worker) = self.list.get_mut(local_rank) {
            worker.has_met = true;
        }
        for worker in self.list.iter_mut().filter(|worker| without.contains(&worker.rank)) {
            worker.left_behind = true;
        }
    }

    /// Sends a signal that does not end the job to every rank that still runs.
    pub(super) fn pass_on(&self, signal: Signal) {
        self.running_workers().for_each(|worker| worker.send(signal));
    }

    /// Sends these signals to every rank that still runs, and marks it as told to end.
    pub(super) fn signal_all(&mut self, signals: &[Signal]) {
        for worker in &mut self.list {
            worker.asked_to_end |= worker.ended.is_none();
            signals.iter().for_each(|&signal| worker.send(signal));
        }
    }

    /// Takes the reading ends of all standard outputs and all standard errors.
    pub(super) fn take_pipes(&mut self) -> (Vec<OwnedFd>, Vec<OwnedFd>) {
        let outs = self.list.iter_mut().filter_map(|worker| worker.child.stdout.take()).map(OwnedFd::from);
        let spare_outs = self.spares.iter_mut().filter_map(|spare| spare.stdout.0.take()).map(OwnedFd::from);
        let outs = outs.chain(spare_outs).collect();
        let errs = self.list.iter_mut().filter_map(|worker| worker.child.stderr.take()).map(OwnedFd::from);
        let spare_errs = self.spares.iter_mut().filter_map(|spare| spare.stderr.0.take()).map(OwnedFd::from);
        (outs, errs.chain(spare_errs).collect())
    }

    /// No more ranks will be started: closes the spare pipes, so that their readers do not wait for them.
    pub(super) fn close_spares(&mut self) {
        self.spares.clear();
    }

    /// Whether one more rank can be started.
    pub(super) fn has_spare(&self) -> bool {
        !self.spares.is_empty()
    }

    /// Starts one more rank, with the next free number, and returns it; `None` if no spare pipes are left.
    pub(super) fn add(&mut self, config: &SpawnConfig, job: &Job) -> Result<Option<usize>> {
        let Some(spare) = self.spares.front() else { return Ok(None) };
        let pipes = spare.stdout.1.try_clone().and_then(|stdout| Ok((stdout, spare.stderr.1.try_clone()?)));
        let (stdout, stderr) = pipes.map_err(|reason| Error::system("cannot start a rank", reason))?;
        let local_rank = self.list.len();
        let rank = job.rank(local_rank);
        let mut command = command(config, job, local_rank)?;
        command.env(NEWCOMER, "1").stdin(Stdio::null()).stdout(stdout).stderr(stderr);
        self.launch(&mut command, local_rank, rank, config)?;
        // Removed only now: the pipes are assigned by local rank, and a rank that could not be started uses none.
        self.spares.pop_front();
        Ok(Some(rank))
    }

    fn launch(
        &mut self,
        command: &mut Command,
        local_rank: usize,
        rank: usize,
        config: &SpawnConfig,
    ) -> Result<()> {
        tie::to_this_thread(unblocked(command, &FORWARDED_SIGNALS));
        let program = command.get_program().to_owned();
        let is_newcomer = local_rank >= config.local_world_size();
        let child = command.spawn().map_err(|e| refused(rank, config.world_size, program.as_ref(), &e))?;
        let (pid, handle) = (child.id(), Pid::from_child(&child));
        self.reaper.iter().for_each(|reaper| reaper.add(handle));
        tracing::debug!(rank, pid, "started");
        self.list.push(Worker {
            rank,
            child,
            reaper: self.reaper.clone(),
            pid,
            ended: None,
            asked_to_end: false,
            is_newcomer,
            has_met: false,
            left_behind: false,
        });
        let watched = self.watch.add(local_rank, handle);
        if watched.is_err()
            && let Some(mut worker) = self.list.pop()
        {
            // Its exit would go unnoticed.
            worker.send(Signal::KILL);
            let _ = worker.reap();
        }
        watched.map_err(|e| Error::system("cannot watch a worker", e))
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.given_up {
            return;
        }
        self.signal_all(&[Signal::KILL]);
        for worker in self.list.iter_mut().filter(|worker| worker.ended.is_none()) {
            // Fails only if other code of this process has reaped it.
            let _ = worker.reap();
        }
        self.watch.join();
    }
}

/// Pipes of a rank that may be started later. The forwarding threads poll their reading ends from the beginning.
struct Spare {
    stdout: (Option<PipeReader>, PipeWriter),
    stderr: (Option<PipeReader>, PipeWriter),
}

impl Spare {
    fn new() -> Result<Self> {
        let pipe = || {
            let (reader, writer) = io::pipe().map_err(|e| Error::system("making a pipe", e))?;
            Ok::<_, Error>((Some(reader), writer))
        };
        Ok(Self { stdout: pipe()?, stderr: pipe()? })
    }
}

/// Starts all ranks, or none: if one cannot be started, those before it are killed.
pub(super) fn start(
    config: &SpawnConfig,
    job: &Job,
    master: Option<Master>,
    reaper: Option<Arc<Reaper>>,
    events: &Sender<Event>,
) -> Result<Workers> {
    let (mut listener, reserved) = master.map_or((None, None), Master::split);
    let spares = (0..config.spares()).map(|_| Spare::new()).collect::<Result<_>>()?;
    let mut workers = Workers {
        list: Vec::new(),
        watch: Watch::new(events),
        reaper,
        _reserved: reserved,
        spares,
        given_up: false,
    };
    for local_rank in 0..config.local_world_size() {
        let mut command = command(config, job, local_rank)?;
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // Rank 0 gets the only copy.
        if let Some(listener) = listener.take() {
            command.env(LISTENER, LISTENER_STDIN).stdin(OwnedFd::from(listener));
        }
        workers.launch(&mut command, local_rank, job.rank(local_rank), config)?;
    }
    workers.watch.run().map_err(|e| Error::system("cannot watch the workers", e))?;
    Ok(workers)
}

/// Returns the command of a rank, with its environment.
fn command(config: &SpawnConfig, job: &Job, local_rank: usize) -> Result<Command> {
    let mut command = match &config.program {
        Some(program) => Command::new(program),
        None => program::command().map_err(|e| Error::system("cannot find this program's file", e))?,
    };
    command.args(config.arguments()).envs(config.env.iter().map(|(name, value)| (name, value)));
    job.set_environment(local_rank, &mut command);
    Ok(command)
}

fn refused(rank: usize, world_size: usize, program: &Path, error: &io::Error) -> Error {
    match error.kind() {
        ErrorKind::NotFound
        | ErrorKind::PermissionDenied
        | ErrorKind::IsADirectory
        | ErrorKind::NotADirectory => {
            Error::invalid("program", program.display(), format!("it cannot be run: {error}"))
        }
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => Error::system(
            format!("cannot start rank {rank} of {world_size}"),
            format!("{error}; start fewer ranks, or raise the limit of processes (ulimit -u)"),
        ),
        _ => {
            Error::system(format!("cannot start rank {rank} of {world_size} ({})", program.display()), error)
        }
    }
}
