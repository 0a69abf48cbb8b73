//! Starting the processes of the ranks, and owning them.

use std::io::{self, ErrorKind};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;

use rustix::process::{Pid, Signal, kill_process};

use super::SpawnConfig;
use super::environment::Job;
use super::failure::ExitKind;
use super::supervise::Event;
use super::watch::Watch;
use crate::{Error, Result};

/// The process of one rank.
pub(super) struct Worker {
    child: Child,
    pub(super) pid: u32,
    /// Once it was reaped.
    pub(super) ended: Option<ExitKind>,
    /// The launcher has told it to end.
    pub(super) told: bool,
}

impl Worker {
    /// Sends a signal, if the process is there. Until it is reaped its id belongs to nobody else.
    pub(super) fn send(&self, signal: Signal) {
        if self.ended.is_none() {
            // Fails only if it has ended by now, or has taken another identity; then nothing can be done about it.
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
    }

    /// Takes note of how it ended. Blocks until it has.
    pub(super) fn reap(&mut self) -> io::Result<ExitKind> {
        let status = ExitKind::from(self.child.wait()?);
        self.ended = Some(status);
        Ok(status)
    }
}

/// The processes of a job, by rank. Dropping it ends those that still run.
pub(super) struct Workers {
    pub(super) list: Vec<Worker>,
    watch: Watch,
    /// Some cannot be ended: nobody waits for them any more.
    pub(super) given_up: bool,
}

impl Workers {
    pub(super) fn running(&self) -> usize {
        self.list.iter().filter(|worker| worker.ended.is_none()).count()
    }

    /// Sends these signals to every rank that still runs, and remembers that they were told.
    pub(super) fn tell(&mut self, signals: &[Signal]) {
        for worker in &mut self.list {
            worker.told |= worker.ended.is_none();
            signals.iter().for_each(|&signal| worker.send(signal));
        }
    }

    /// The reading ends of all standard outputs and all standard errors.
    pub(super) fn take_pipes(&mut self) -> (Vec<OwnedFd>, Vec<OwnedFd>) {
        let outs =
            self.list.iter_mut().filter_map(|worker| worker.child.stdout.take()).map(OwnedFd::from).collect();
        let errs =
            self.list.iter_mut().filter_map(|worker| worker.child.stderr.take()).map(OwnedFd::from).collect();
        (outs, errs)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if self.given_up {
            return;
        }
        self.tell(&[Signal::KILL]);
        for worker in self.list.iter_mut().filter(|worker| worker.ended.is_none()) {
            // Fails only where somebody else has reaped it.
            let _ = worker.reap();
        }
        self.watch.join();
    }
}

/// Starts all ranks, or none: if one cannot be started, those before it are ended.
pub(super) fn start(config: &SpawnConfig, events: &Sender<Event>) -> Result<Workers> {
    let program = match &config.program {
        Some(program) => program.clone(),
        None => std::env::current_exe().map_err(|e| Error::system("cannot find this program's file", e))?,
    };
    let args = config.args.clone().unwrap_or_else(|| std::env::args_os().skip(1).collect());
    let listener = TcpListener::bind("127.0.0.1:0")
        .map_err(|e| Error::Listen { address: "127.0.0.1:0".into(), reason: e.to_string() })?;
    let job = Job::new(config, &listener)?;
    let mut listener = Some(listener);
    let mut workers = Workers { list: Vec::new(), watch: Watch::new(events), given_up: false };
    for rank in 0..config.world_size {
        // Rank 0 gets the only copy.
        let stdin = listener.take().map_or_else(Stdio::null, |listener| OwnedFd::from(listener).into());
        let mut command = Command::new(&program);
        command.args(&args).envs(config.env.iter().map(|(name, value)| (name, value)));
        job.tell(rank, &mut command);
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|e| refused(rank, config.world_size, &program, &e))?;
        let (pid, handle) = (child.id(), Pid::from_child(&child));
        tracing::debug!(rank, pid, "started");
        workers.list.push(Worker { child, pid, ended: None, told: false });
        workers.watch.add(rank, handle).map_err(|e| Error::system("cannot watch a worker", e))?;
    }
    workers.watch.run().map_err(|e| Error::system("cannot watch the workers", e))?;
    Ok(workers)
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
