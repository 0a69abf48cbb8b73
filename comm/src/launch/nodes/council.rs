//! What becomes of a job whose ranks are on several nodes, or on one: the first node's launcher decides, from what all say.
//! No sockets, no processes.

use std::time::{Duration, Instant};

use super::message::{Ending, Order, Round, Verdict, Word};
use crate::launch::failure::CLOSE;
use crate::launch::{EXIT_PEER_FAILED, ExitKind, NodeName, WorkerFailure};

const SIGKILL: ExitKind = ExitKind::Signal(9);

/// To each node its orders.
pub(super) type Orders = Vec<(usize, Order)>;

/// How far a node is.
#[derive(Debug, Clone, PartialEq)]
enum Stage {
    /// It has not said that it is ready for the next round.
    Awaited,
    Ready,
    Running,
    Ended,
    /// There is no connection to its launcher any more.
    Gone,
}

/// A rank's failure, as the council knows it.
#[derive(Debug, Clone)]
struct Failed {
    failure: WorkerFailure,
    at: Instant,
    is_final: bool,
}

/// Listens to all nodes and decides.
pub(super) struct Council {
    stages: Vec<Stage>,
    names: Vec<NodeName>,
    local_world_sizes: Vec<Option<usize>>,
    round: Round,
    failures: Vec<Failed>,
    /// What ends the job whatever the ranks do: the first such thing.
    end: Option<Verdict>,
    over: bool,
}

impl Council {
    /// `hosts` are the addresses of the nodes, until they tell their names.
    pub(super) fn new(hosts: Vec<String>, round: Round) -> Self {
        let nodes = hosts.len();
        let name = |(node, host)| NodeName { node, host };
        Self {
            stages: vec![Stage::Awaited; nodes],
            names: hosts.into_iter().enumerate().map(name).collect(),
            local_world_sizes: vec![None; nodes],
            round,
            failures: Vec::new(),
            end: None,
            over: false,
        }
    }

    /// Takes note of a node's word; what is to be done now.
    pub(super) fn hear(&mut self, node: usize, word: Word, now: Instant) -> Orders {
        if self.over || self.stages[node] == Stage::Gone {
            return Vec::new();
        }
        match word {
            Word::Ready { host, local_world_size, port } => self.ready(node, host, local_world_size, port),
            Word::Failing => self.stop(),
            Word::Ended(ending) => self.ended(node, ending, now),
            Word::Gone => {
                self.stages[node] = Stage::Gone;
                self.end.get_or_insert(Verdict::Gone(self.names[node].clone()));
                self.settle()
            }
        }
    }

    fn ready(&mut self, node: usize, host: String, local_world_size: usize, port: u16) -> Orders {
        self.stages[node] = Stage::Ready;
        self.names[node].host = host;
        self.local_world_sizes[node] = Some(local_world_size);
        if node == 0 {
            self.round.port = port;
        }
        if self.end.is_some() {
            return self.settle();
        }
        if self.stages.iter().any(|stage| *stage != Stage::Ready) {
            return Vec::new();
        }
        if let Some(odd) = self.local_world_sizes.iter().position(|size| *size != self.local_world_sizes[0]) {
            let count = |node: usize| self.local_world_sizes[node].unwrap_or_default();
            let reason = format!(
                "--nproc-per-node: got {}, {} has {}; give the same on every node",
                count(odd),
                self.names[0],
                count(0)
            );
            self.end = Some(Verdict::Stopped { node: self.names[odd].clone(), reason });
            return self.settle();
        }
        self.stages.fill(Stage::Running);
        (0..self.stages.len()).map(|node| (node, Order::Start(self.round.clone()))).collect()
    }

    fn ended(&mut self, node: usize, ending: Ending, now: Instant) -> Orders {
        self.stages[node] = Stage::Ended;
        match ending {
            Ending::Done => {}
            Ending::Failed { mut failure, ago_ms, is_final } => {
                failure.node = (self.names.len() > 1).then(|| self.names[node].clone());
                let at = now.checked_sub(Duration::from_millis(ago_ms)).unwrap_or(now);
                self.failures.push(Failed { failure, at, is_final });
            }
            Ending::Stopped(reason) => {
                let node = self.names[node].clone();
                self.end.get_or_insert(Verdict::Stopped { node, reason });
            }
        }
        self.settle()
    }

    /// Orders for those whose ranks still run.
    fn stop(&self) -> Orders {
        self.those_at(|stage| *stage == Stage::Running).map(|node| (node, Order::Stop)).collect()
    }

    fn those_at(&self, is: impl Fn(&Stage) -> bool) -> impl Iterator<Item = usize> {
        let nodes: Vec<usize> = (0..self.stages.len()).filter(|&node| is(&self.stages[node])).collect();
        nodes.into_iter()
    }

    /// Decides, once no rank runs any more.
    fn settle(&mut self) -> Orders {
        let runs = |stage: &Stage| *stage == Stage::Running;
        if self.stages.iter().any(runs) {
            let in_vain = self.end.is_some() || !self.failures.is_empty();
            return if in_vain { self.stop() } else { Vec::new() };
        }
        let verdict = match (self.end.take(), self.first_cause()) {
            (Some(end), _) => end,
            (None, None) => Verdict::Done,
            (None, Some(Failed { failure, is_final, .. })) => {
                if self.round.restart < self.round.max_restarts && !is_final {
                    return self.again(&failure);
                }
                Verdict::Failed(failure)
            }
        };
        self.over = true;
        let here = self.those_at(|stage| *stage != Stage::Gone);
        here.map(|node| (node, Order::Over(verdict.clone()))).collect()
    }

    fn again(&mut self, failure: &WorkerFailure) -> Orders {
        self.failures.clear();
        self.stages.fill(Stage::Awaited);
        self.round.restart += 1;
        let order = Order::Again {
            reason: failure.headline(),
            restart: self.round.restart,
            of: self.round.max_restarts,
        };
        (0..self.stages.len()).map(|node| (node, order.clone())).collect()
    }

    /// As on one node: the earliest failure that is not put down to another rank; but one that was killed from outside
    /// comes first where times are close.
    fn first_cause(&self) -> Option<Failed> {
        let own = |failed: &&Failed| failed.failure.status != ExitKind::Code(EXIT_PEER_FAILED);
        let earliest = |failures: Vec<&Failed>| failures.into_iter().min_by_key(|failed| failed.at).cloned();
        let cause = earliest(self.failures.iter().filter(own).collect())
            .or_else(|| earliest(self.failures.iter().collect()))?;
        let killed = |failed: &&Failed| failed.failure.status == SIGKILL && failed.at < cause.at + CLOSE;
        let mut cause = self.failures.iter().find(killed).cloned().unwrap_or(cause);
        let all: usize = self.failures.iter().map(|failed| 1 + failed.failure.also_failed).sum();
        cause.failure.also_failed = all - 1;
        Some(cause)
    }
}

#[cfg(test)]
mod tests;
