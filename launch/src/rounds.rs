//! The rounds of a job on this node: the ranks are started, end, and may be started again.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use comm::EXIT_PEER_FAILED;

use super::elastic::JobFolder;
use super::environment::Job;
use super::event::{Event, Inbox};
use super::failure_announcer::{EndedRank, FailureAnnouncer};
use super::forward::Output;
use super::master::Master;
use super::nodes::Nodes;
use super::reaper::Reaper;
use super::signals::StopSignal;
use super::start;
use super::supervise::{Finished, Supervisor};
use crate::message::{Ending, JobOutcome, NodeMessage, Order, Round};
use crate::{Error, ExitKind, Result, SpawnConfig, WorkerFailure, signal_name};

/// The report of each rank, by local rank.
type Reports = Vec<Option<String>>;

/// A job from its first start to its end, as one node's launcher sees it.
pub(super) struct Rounds<'a> {
    pub(super) config: &'a SpawnConfig,
    pub(super) nodes: Nodes,
    pub(super) inbox: Inbox,
    pub(super) events: Sender<Event>,
    /// Signal that arrived while this node had no ranks.
    pub(super) signal: Option<StopSignal>,
    /// Settings of the last round.
    pub(super) job: Option<Job>,
    /// Announces to ranks of other nodes that are still joining that a rank has ended.
    pub(super) announcer: Option<FailureAnnouncer>,
    /// Why a log of this or an earlier round is incomplete.
    pub(super) lost_log: Option<comm::Error>,
}

impl Rounds<'_> {
    pub(super) fn run(mut self) -> Result<Reports> {
        loop {
            // It may use the rendezvous port of the round before.
            self.announcer = None;
            let master = self.open().inspect_err(|error| {
                self.nodes.send(NodeMessage::Ended(Ending::Stopped(error.to_string())));
            })?;
            let port = master.as_ref().map_or(0, |master| master.port);
            let local_world_size = self.config.local_world_size();
            let elastic = self.config.elastic.as_ref().map(|elastic| elastic.min);
            let max_restarts = self.config.max_restarts;
            self.nodes.send(NodeMessage::Ready {
                host: comm::internal::host_name(),
                local_world_size,
                port,
                elastic,
                max_restarts,
            });
            let round = match self.order()? {
                Order::Start(round) => round,
                Order::Over(outcome) => return self.conclude(outcome, Ok(Vec::new())),
                Order::Stop
                | Order::GoOn(_)
                | Order::Note(_)
                | Order::HasEnded(_)
                | Order::IsMissed { .. }
                | Order::Again { .. } => continue,
            };
            let Finished { result, failed_at, lost_log, announcer } =
                self.round(&round, master).unwrap_or_else(Finished::of);
            self.announcer = announcer;
            self.lost_log = self.lost_log.take().or(lost_log);
            self.nodes.send(NodeMessage::Ended(self.ending(&result, failed_at)));
            let had_outcome = self.inbox.has_kept();
            match self.order()? {
                Order::Over(outcome) if !had_outcome => return self.conclude_without(outcome, result),
                Order::Over(outcome) => return self.conclude(outcome, result),
                Order::Again { reason, restart, of } => {
                    tracing::warn!("{reason}; all ranks start again (restart {restart} of {of})");
                }
                Order::Start(_)
                | Order::Stop
                | Order::GoOn(_)
                | Order::Note(_)
                | Order::HasEnded(_)
                | Order::IsMissed { .. } => {}
            }
        }
    }

    /// Opens the rendezvous port of the ranks, on the first node only.
    fn open(&self) -> Result<Option<Master>> {
        let open = || Master::open(self.config, self.nodes.host.as_deref());
        Ok((self.config.node_rank == 0).then(open).transpose()?)
    }

    fn round(&mut self, round: &Round, master: Option<Master>) -> Result<Finished> {
        let config = self.config;
        let job = Job::new(config, round, self.nodes.address)?;
        let folder = config.elastic.is_some().then(|| JobFolder::new(job.spawn_id())).transpose()?;
        let job = match (&folder, &config.elastic) {
            (Some(folder), Some(elastic)) => {
                let job = job.with_ended_file(folder.file("ended"));
                if elastic.replace > 0 { job.with_group_file(folder.file("group")) } else { job }
            }
            _ => job,
        };
        let job: &Job = self.job.insert(job);
        // Dropped last: by then the ranks that it would kill have been reaped.
        let reaper = config.sweep.then(|| Reaper::start(job.spawn_id())).transpose()?.map(Arc::new);
        let mut workers = start::start(config, job, master, reaper.clone(), &self.events)?;
        let output = Output::start(&mut workers, config, job, &self.events)?;
        Ok(Supervisor::new(config, job, workers, output, &mut self.inbox, &self.nodes).run())
    }

    fn ending(&self, result: &Result<Reports>, failed_at: Option<Instant>) -> Ending {
        match result {
            Ok(_) => Ending::Done,
            Err(Error::Worker(failure)) => {
                let ago = failed_at.map_or(0, |at| at.elapsed().as_millis());
                Ending::Failed {
                    failure: (**failure).clone(),
                    ago_ms: u64::try_from(ago).unwrap_or(u64::MAX),
                    is_final: self.config.is_final(failure.status),
                }
            }
            Err(Error::Interrupted { signal }) => Ending::Stopped(by_signal(*signal)),
            Err(error) => Ending::Stopped(error.to_string()),
        }
    }

    /// Waits for the coordinator's next order that concerns this launcher; orders for ranks are skipped, as there are none
    /// here.
    fn order(&mut self) -> Result<Order> {
        let period = self.nodes.period();
        let next_look = || period.map(|period| Instant::now() + period);
        let (mut look, mut waited) = (next_look(), Duration::ZERO);
        loop {
            match self.inbox.kept_or_next(look) {
                Some(Event::Order(Order::Stop | Order::HasEnded(_))) => {}
                Some(Event::Order(Order::IsMissed { rank, host })) => self.announce(rank, host),
                Some(Event::Order(Order::GoOn(what) | Order::Note(what))) => tracing::warn!("{what}"),
                Some(Event::Order(order)) => return Ok(order),
                Some(Event::Signal(signal))
                    if self.signal.is_some_and(|first| first.is_repeated_by(signal)) => {}
                // Another signal ends the launcher at once.
                Some(Event::Signal(signal)) if self.signal.is_some() => {
                    return Err(Error::Interrupted { signal });
                }
                Some(Event::Signal(signal)) => {
                    self.signal = Some(StopSignal::new(signal));
                    self.nodes.send(NodeMessage::Ended(Ending::Stopped(by_signal(signal))));
                }
                Some(_) => {}
                None => {
                    let ended = || Error::system("the launcher", "its threads have ended");
                    waited += period.ok_or_else(ended)?;
                    self.nodes.give_up_the_silent(waited);
                    look = next_look();
                }
            }
        }
    }

    /// A rank of another node has ended after all ranks of this node, which is the first one: announces it.
    fn announce(&mut self, rank: usize, host: String) {
        if let Some(job) = &self.job {
            let death = EndedRank { rank, host, leader_has_ended: true };
            FailureAnnouncer::announce(&mut self.announcer, self.config, job, death);
        }
    }

    /// As [`conclude`](Self::conclude), when the ranks of this node ended before the outcome arrived. If the first node
    /// is lost, so that no outcome of the coordinator exists, a rank that failed here by itself is the best known cause.
    fn conclude_without(&self, outcome: JobOutcome, result: Result<Reports>) -> Result<Reports> {
        let of_first =
            matches!(&outcome, JobOutcome::Gone(node) | JobOutcome::Silent { node, .. } if node.node == 0);
        let own = |failure: &WorkerFailure| failure.status != ExitKind::Code(EXIT_PEER_FAILED);
        match &result {
            Err(Error::Worker(failure)) if of_first && own(failure) => {
                if let Err(error) = self.conclude(outcome, Ok(Vec::new())) {
                    tracing::warn!("{error}");
                }
                result
            }
            _ => self.conclude(outcome, result),
        }
    }

    fn conclude(&self, outcome: JobOutcome, result: Result<Reports>) -> Result<Reports> {
        match outcome {
            JobOutcome::Done => match self.signal {
                // One that came while the last processes were cleaned up.
                Some(StopSignal { number: signal, .. }) => Err(Error::Interrupted { signal }),
                None => self.lost_log.clone().map_or(result, |error| Err(error.into())),
            },
            JobOutcome::Failed(failure) => Err(Box::new(failure).into()),
            JobOutcome::Gone(node) => Err(Error::NodeGone(node)),
            JobOutcome::Silent { node, ms } => {
                Err(Error::NodeSilent { node, silence: Duration::from_millis(ms) })
            }
            // Whichever node has ended it: its ranks have stopped with a checkpoint.
            JobOutcome::Stopped { .. } if matches!(result, Err(Error::Checkpointed)) => result,
            JobOutcome::Stopped { node, reason } => match (node.node == self.config.node_rank, self.signal) {
                (true, Some(StopSignal { number: signal, .. })) => Err(Error::Interrupted { signal }),
                (true, None) if result.is_err() => result,
                _ => Err(Error::NodeStopped { node, reason }),
            },
        }
    }
}

fn by_signal(signal: i32) -> String {
    format!("stopped by {}", signal_name(signal))
}
