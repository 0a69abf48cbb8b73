//! From the start of the ranks to the end of the last one.

use std::io::{self, ErrorKind};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use signal_hook::consts::SIGPIPE;

use super::SpawnConfig;
use super::failure::{Ended, WorkerFailure, first_cause};
use super::forward::{Captured, Output};
use super::signals::SignalRelay;
use super::start::Workers;
use crate::{Error, Result};

/// Between SIGTERM and SIGKILL.
const TERM_TIME: Duration = Duration::from_millis(300);
/// How long a process may take to vanish after SIGKILL. Only one that hangs in the kernel takes longer.
const KILL_TIME: Duration = Duration::from_secs(5);
/// How long the last lines of a job that was stopped may take to be written, where the reader is slow.
const DRAIN_TIME: Duration = Duration::from_millis(300);

/// What the launcher's threads have to say.
#[derive(Debug)]
pub(super) enum Event {
    /// The process of this rank has ended, and waits to be reaped.
    Exited(usize),
    /// This process got a signal that is for the ranks.
    Signal(i32),
    /// Standard output cannot be written any more.
    OutputFailed(io::Error),
    /// One of the forwarding threads has forwarded all there was.
    Drained,
}

/// How far things have gone; each stage but the first has a deadline.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Running,
    /// One rank has failed, the others may end by themselves.
    Grace,
    /// All were asked to end.
    Asked,
    Killed,
}

/// Looks after the ranks of one job. Fields are dropped in this order: ranks, their output, signals.
pub(super) struct Supervisor {
    workers: Workers,
    output: Output,
    events: Receiver<Event>,
    _signals: SignalRelay,
    grace: Duration,
    stage: Stage,
    deadline: Option<Instant>,
    /// In the order of time.
    ended: Vec<Ended>,
    drained: usize,
    /// The signal that stopped the job.
    signal: Option<i32>,
    output_error: Option<io::Error>,
}

impl Supervisor {
    pub(super) fn new(
        config: &SpawnConfig,
        workers: Workers,
        output: Output,
        events: Receiver<Event>,
        signals: SignalRelay,
    ) -> Self {
        Self {
            workers,
            output,
            events,
            _signals: signals,
            grace: config.grace,
            stage: Stage::Running,
            deadline: None,
            ended: Vec::new(),
            drained: 0,
            signal: None,
            output_error: None,
        }
    }

    pub(super) fn run(mut self) -> Result<Vec<Option<String>>> {
        while self.workers.running() > 0 && !self.workers.given_up {
            match self.next() {
                Some(event) => self.handle(event)?,
                None => self.escalate(),
            }
        }
        let captured = self.drain()?;
        self.outcome(captured)
    }

    /// The next event, or `None` at the deadline.
    fn next(&self) -> Option<Event> {
        match self.deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.events.recv_timeout(left).ok()
            }
        }
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Exited(rank) => return self.exited(rank),
            Event::Signal(number) => self.interrupted(number),
            Event::OutputFailed(error) => {
                self.output_error.get_or_insert(error);
                self.ask(&[Signal::TERM, Signal::CONT], TERM_TIME);
            }
            Event::Drained => self.drained += 1,
        }
        Ok(())
    }

    fn exited(&mut self, rank: usize) -> Result<()> {
        let worker = &mut self.workers.list[rank];
        let status = worker.reap().map_err(|e| Error::system(format!("cannot wait for rank {rank}"), e))?;
        tracing::debug!(rank, pid = worker.pid, %status, "ended");
        self.ended.push(Ended { rank, status, told: worker.told, at: Instant::now() });
        if !status.success() && self.stage == Stage::Running {
            self.enter(Stage::Grace, self.grace);
        }
        Ok(())
    }

    /// The first signal is passed on; a second one ends the ranks at once.
    fn interrupted(&mut self, number: i32) {
        if self.signal.replace(number).is_some() {
            self.kill();
        } else if let Some(signal) = Signal::from_named_raw(number) {
            // A stopped process takes notice only when it goes on.
            self.ask(&[signal, Signal::CONT], self.grace);
        }
    }

    fn ask(&mut self, signals: &[Signal], time: Duration) {
        if self.stage != Stage::Killed {
            self.workers.tell(signals);
            self.enter(Stage::Asked, time);
        }
    }

    fn kill(&mut self) {
        self.workers.tell(&[Signal::KILL]);
        self.enter(Stage::Killed, KILL_TIME);
    }

    fn enter(&mut self, stage: Stage, time: Duration) {
        self.stage = stage;
        self.deadline = Instant::now().checked_add(time);
    }

    /// The deadline of this stage has passed.
    fn escalate(&mut self) {
        match self.stage {
            Stage::Running | Stage::Grace => self.ask(&[Signal::TERM, Signal::CONT], TERM_TIME),
            Stage::Asked => self.kill(),
            Stage::Killed => self.workers.given_up = true,
        }
    }

    /// Waits until the ranks' last lines are written. Only a job that was stopped does not wait for a slow reader.
    fn drain(&mut self) -> Result<Captured> {
        self.output.finish();
        let stopped = self.stage != Stage::Running;
        self.deadline = stopped.then(|| Instant::now() + DRAIN_TIME);
        while self.drained < Output::THREADS {
            match self.next() {
                Some(Event::Signal(number)) => {
                    self.signal.get_or_insert(number);
                    break;
                }
                Some(event) => self.handle(event)?,
                None => break,
            }
        }
        Ok(self.output.join())
    }

    fn outcome(mut self, captured: Captured) -> Result<Vec<Option<String>>> {
        // A signal that came at the very end was meant for the job as well.
        while let Ok(event) = self.events.try_recv() {
            if let Event::Signal(number) = event {
                self.signal.get_or_insert(number);
            }
        }
        if let Some((cause, also_failed)) = first_cause(&self.ended, self.signal) {
            let Captured { mut tails, .. } = captured;
            let stderr_tail = tails.get_mut(cause.rank).map(std::mem::take).unwrap_or_default().into();
            let Ended { rank, status, .. } = cause;
            let pid = self.workers.list[rank].pid;
            return Err(Box::new(WorkerFailure { rank, pid, status, stderr_tail, also_failed }).into());
        }
        if let Some(signal) = self.signal {
            return Err(Error::Interrupted { signal });
        }
        match self.output_error {
            Some(error) if error.kind() == ErrorKind::BrokenPipe => {
                Err(Error::Interrupted { signal: SIGPIPE })
            }
            Some(error) => Err(Error::system("cannot write the workers' output", error)),
            None => Ok(captured.results),
        }
    }
}
