//! Supervises the ranks of one round, from their start until the last one has ended.

mod lost;
mod outcome;

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use comm::EXIT_PEER_FAILED;
use rustix::process::Signal;
use signal_hook::consts::SIGPIPE;

use super::environment::Job;
use super::event::{Event, Inbox};
use super::failure::Ended;
use super::failure_announcer::{EndedRank, FailureAnnouncer};
use super::forward::{Captured, Output};
use super::nodes::Nodes;
use super::signals::StopSignal;
use super::start::{Worker, Workers};
use crate::message::{NodeMessage, Order};
use crate::{Error, ExitKind, Result, SpawnConfig, WorkerFailure};

/// Time between SIGTERM and SIGKILL for ranks that a job which is done does not need.
const TERM_TIME: Duration = Duration::from_millis(300);
/// How long a process may take to vanish after SIGKILL. Only a process that hangs in the kernel takes longer.
const KILL_TIME: Duration = Duration::from_secs(5);
/// How long writing the last lines of a job that was stopped may take, if the reader is slow.
const DRAIN_TIME: Duration = Duration::from_millis(300);
/// How much later than the ranks this process may receive a signal that was sent to all.
const SIGNAL_TIME: Duration = Duration::from_millis(300);

/// How the ranks of this node ended.
pub(super) struct Finished {
    /// The report of each rank, or the first cause.
    pub(super) result: Result<Vec<Option<String>>>,
    /// When the rank failed that is the first cause.
    pub(super) failed_at: Option<Instant>,
    /// Why a log is incomplete.
    pub(super) lost_log: Option<comm::Error>,
    /// Still running, because ranks of other nodes may still be joining.
    pub(super) announcer: Option<FailureAnnouncer>,
}

impl Finished {
    /// The result of a round that could not be started.
    pub(super) fn of(error: Error) -> Self {
        Self { result: Err(error), failed_at: None, lost_log: None, announcer: None }
    }
}

/// Stage of a round; each but the first has a deadline.
#[derive(Debug, Clone, Copy, PartialEq)]
enum RoundPhase {
    Running,
    /// A rank has failed; the others may end by themselves.
    Grace,
    /// The members of the group have ended, at least one successfully. Only excluded ranks and ranks that have not
    /// joined still run.
    Finishing,
    /// All ranks were asked to end.
    Asked,
    Killed,
}

/// Supervises the ranks of one round. The fields are dropped in this order: first the ranks, then their output.
pub(super) struct Supervisor<'a> {
    workers: Workers,
    output: Output,
    inbox: &'a mut Inbox,
    nodes: &'a Nodes,
    config: &'a SpawnConfig,
    job: &'a Job,
    phase: RoundPhase,
    deadline: Option<Instant>,
    /// In chronological order.
    ended: Vec<Ended>,
    /// The ranks have formed a group: from now on the others can continue without one of them.
    has_group: bool,
    /// Lost ranks without which the others continue; on several nodes, unless the coordinator decides otherwise.
    lost: Vec<Ended>,
    /// The coordinator has announced that the others continue without some ranks.
    gone_on: bool,
    /// Announces the first failure to ranks that are still joining.
    announcer: Option<FailureAnnouncer>,
    drained: usize,
    /// The signal that stopped the job.
    signal: Option<StopSignal>,
    output_error: Option<io::Error>,
    /// The job was done when the remaining ranks were asked to end.
    is_done: bool,
}

impl<'a> Supervisor<'a> {
    pub(super) fn new(
        config: &'a SpawnConfig,
        job: &'a Job,
        workers: Workers,
        output: Output,
        inbox: &'a mut Inbox,
        nodes: &'a Nodes,
    ) -> Self {
        Self {
            workers,
            output,
            inbox,
            nodes,
            config,
            job,
            phase: RoundPhase::Running,
            deadline: None,
            ended: Vec::new(),
            has_group: false,
            lost: Vec::new(),
            gone_on: false,
            announcer: None,
            drained: 0,
            signal: None,
            output_error: None,
            is_done: false,
        }
    }

    pub(super) fn run(mut self) -> Finished {
        let mut captured = self.watch();
        let lost_log = captured.as_mut().ok().and_then(|captured| captured.lost_log.take());
        let failed_at = self.cause().map(|(cause, _)| cause.at);
        let announcer = self.announcer.take();
        Finished {
            result: captured.and_then(|captured| self.outcome(captured)),
            failed_at,
            lost_log,
            announcer,
        }
    }

    /// Returns the signal that stopped the job, if any. An output pipe without a reader counts as SIGPIPE.
    fn stopped_by(&self) -> Option<i32> {
        let is_unread = |error: &&io::Error| error.kind() == ErrorKind::BrokenPipe;
        let number = self.signal.map(|signal| signal.number);
        number.or(self.output_error.as_ref().filter(is_unread).map(|_| SIGPIPE))
    }

    fn watch(&mut self) -> Result<Captured> {
        while self.workers.running() > 0 && !self.workers.given_up {
            match self.inbox.next(self.deadline) {
                Some(event) => self.handle(event)?,
                None => self.escalate(),
            }
        }
        self.workers.close_spares();
        if self.config.nodes == 1 {
            // Its port may be needed again.
            self.announcer = None;
        }
        self.drain()
    }

    fn handle(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Exited { local_rank, pid } => return self.exited(local_rank, pid),
            Event::Met { local_rank, without } => {
                self.workers.have_met(local_rank, &without);
                let is_first = !std::mem::replace(&mut self.has_group, true);
                // Once the ranks are being ended, the report is withheld: the others would continue with ranks that are
                // about to vanish.
                let are_ended = matches!(self.phase, RoundPhase::Asked | RoundPhase::Killed);
                if (is_first || !without.is_empty()) && !are_ended {
                    self.nodes.send(NodeMessage::Met { without });
                }
                // On several nodes the coordinator decides this.
                if is_first && self.config.nodes == 1 {
                    self.recover_first_failures();
                }
                self.look_who_is_left();
            }
            Event::Signal(number) => self.interrupted(number),
            Event::UserSignal(number) => {
                Signal::from_named_raw(number).into_iter().for_each(|signal| self.workers.pass_on(signal));
            }
            Event::OutputFailed(error) => {
                self.output_error.get_or_insert(error);
                self.ask(&[Signal::TERM, Signal::CONT], self.config.grace);
            }
            Event::Drained => self.drained += 1,
            Event::Order(order) => self.ordered(order),
        }
        Ok(())
    }

    /// Handles an order of the coordinator, for example because ranks of other nodes have failed or their launcher is gone.
    fn ordered(&mut self, order: Order) {
        match &order {
            Order::GoOn(what) => {
                tracing::warn!("{what}");
                self.gone_on = true;
                self.recover_first_failures();
                return self.look_who_is_left();
            }
            Order::Note(what) => return tracing::warn!("{what}"),
            Order::HasEnded(rank) => return self.job.record_end(*rank),
            Order::IsMissed { rank, host } => return self.announce(*rank, host.clone()),
            _ => {}
        }
        if self.is_at_work() {
            self.count_recent_losses();
            self.enter(RoundPhase::Grace, self.config.failure_grace);
        }
        if !matches!(order, Order::Stop) {
            self.inbox.keep(Event::Order(order));
        }
    }

    fn exited(&mut self, local_rank: usize, pid: u32) -> Result<()> {
        // One of an earlier round, which could not be killed in time.
        let is_own = |worker: &&mut Worker| worker.pid == pid && worker.ended.is_none();
        let Some(worker) = self.workers.list.get_mut(local_rank).filter(is_own) else { return Ok(()) };
        let rank = worker.rank;
        let status = worker.reap().map_err(|e| Error::system(format!("cannot wait for rank {rank}"), e))?;
        tracing::debug!(rank, pid, %status, "ended");
        let end = Ended { rank, status, asked_to_end: worker.asked_to_end, at: Instant::now() };
        if self.config.elastic.is_some() {
            self.nodes.send(NodeMessage::HasEnded(rank));
        }
        self.announcer.iter().for_each(|announcer| announcer.note_end(rank));
        if self.goes_on_without(end) {
            self.look_who_is_left();
            return Ok(());
        }
        if !status.success() && self.phase == RoundPhase::Running {
            self.count_recent_losses();
        }
        self.ended.push(end);
        if status.success() {
            self.look_who_is_left();
        } else if self.phase == RoundPhase::Running {
            self.enter(RoundPhase::Grace, self.config.failure_grace);
            if self.config.nodes > 1 {
                self.nodes.send(NodeMessage::Failing { rank, status });
            }
            self.announce_own(end);
        } else if self.phase == RoundPhase::Grace && !end.asked_to_end {
            self.further_failure(end);
        }
        Ok(())
    }

    /// Handles a further failure. An earlier failure may have been a consequence of this one, so this rank is announced
    /// as missing. On several nodes the coordinator may still receive a report that the ranks had formed a group before;
    /// then this rank is lost like the first one.
    fn further_failure(&mut self, end: Ended) {
        let Ended { rank, status, .. } = end;
        if self.are_lost_here() {
            self.tell_of_loss(end);
        } else if self.config.nodes > 1 {
            self.nodes.send(NodeMessage::Failing { rank, status });
        }
        if !self.has_group {
            self.announce_own(end);
        }
    }

    /// Announces a failed rank of this node, unless it failed because of another rank: such a rank has joined the
    /// group, or has reported the failure itself.
    fn announce_own(&mut self, end: Ended) {
        if end.status != ExitKind::Code(EXIT_PEER_FAILED) {
            self.announce(end.rank, comm::internal::host_name());
        }
    }

    /// Announces to ranks that are still joining that this rank has ended; they would wait for it.
    fn announce(&mut self, rank: usize, host: String) {
        let is_gone = |worker: &Worker| worker.rank == 0 && worker.ended.is_some();
        let leader_has_ended = self.workers.list.iter().any(is_gone);
        let death = EndedRank { rank, host, leader_has_ended };
        FailureAnnouncer::announce(&mut self.announcer, self.config, self.job, death);
    }

    /// Whether nothing has happened yet that ends the ranks.
    fn is_at_work(&self) -> bool {
        matches!(self.phase, RoundPhase::Running | RoundPhase::Finishing)
    }

    /// Handles a signal that ends the job: the first one is passed on, and another one kills the ranks at once.
    fn interrupted(&mut self, number: i32) {
        if self.signal.is_some_and(|first| first.is_repeated_by(number)) {
            return;
        }
        if self.signal.replace(StopSignal::new(number)).is_some() {
            self.kill();
        } else if let Some(signal) = Signal::from_named_raw(number) {
            // A stopped process handles the signal only when it is continued.
            self.ask(&[signal, Signal::CONT], self.config.grace);
        }
    }

    fn ask(&mut self, signals: &[Signal], time: Duration) {
        if self.phase != RoundPhase::Killed {
            self.workers.signal_all(signals);
            self.enter(RoundPhase::Asked, time);
        }
    }

    fn kill(&mut self) {
        self.workers.signal_all(&[Signal::KILL]);
        self.enter(RoundPhase::Killed, KILL_TIME);
    }

    fn enter(&mut self, phase: RoundPhase, time: Duration) {
        self.phase = phase;
        self.deadline = Instant::now().checked_add(time);
    }

    /// Enters the next phase when the deadline has passed.
    fn escalate(&mut self) {
        match self.phase {
            RoundPhase::Running | RoundPhase::Grace => {
                self.ask(&[Signal::TERM, Signal::CONT], self.config.grace)
            }
            RoundPhase::Finishing => {
                self.is_done = true;
                self.workers.running_workers().for_each(Worker::warn_ended);
                self.ask(&[Signal::TERM, Signal::CONT], TERM_TIME);
            }
            RoundPhase::Asked => {
                if !self.is_done {
                    self.warn_killed();
                }
                self.kill();
            }
            RoundPhase::Killed => self.workers.given_up = true,
        }
    }

    /// Warns that ranks are killed because they have not ended in time.
    fn warn_killed(&self) {
        let ranks: Vec<String> =
            self.workers.running_workers().map(|worker| worker.rank.to_string()).collect();
        let (which, have) = if ranks.len() == 1 { ("rank", "has") } else { ("ranks", "have") };
        let (ranks, grace) = (ranks.join(", "), self.config.grace.as_secs_f64());
        tracing::warn!(
            "{which} {ranks} {have} not ended within {grace} s of being asked to (--grace): killed"
        );
    }

    /// Waits until the last lines of the ranks are written. Only a job that was stopped does not wait for a slow
    /// reader.
    fn drain(&mut self) -> Result<Captured> {
        self.output.finish();
        let stopped = !self.is_at_work() && (!self.is_done || self.signal.is_some());
        self.deadline = stopped.then(|| Instant::now() + DRAIN_TIME);
        while self.drained < Output::THREADS {
            match self.inbox.next(self.deadline) {
                Some(Event::Signal(number)) => {
                    self.signal.get_or_insert_with(|| StopSignal::new(number));
                    break;
                }
                Some(event) => self.handle(event)?,
                None => break,
            }
        }
        Ok(self.output.join())
    }

    fn local_rank(&self, rank: usize) -> usize {
        self.workers.list.iter().position(|worker| worker.rank == rank).unwrap_or_default()
    }

    /// Describes the failure of a rank, without its last lines, which may still be in the pipe.
    fn failure(&self, Ended { rank, status, .. }: Ended) -> WorkerFailure {
        let local_rank = self.local_rank(rank);
        WorkerFailure {
            rank,
            pid: self.workers.list[local_rank].pid,
            status,
            stderr_tail: Vec::new(),
            also_failed: 0,
            node: None,
            log: self.output.log(local_rank),
        }
    }
}
