//! The coordinator: the state machine with which the first node's launcher decides, from the messages of all nodes, how a
//! job continues and ends. Used with one node, too. No sockets, no processes.

use std::time::{Duration, Instant};

use comm::EXIT_PEER_FAILED;

use super::losses::{Failed, Losses};
use crate::failure::KILL_PRECEDENCE;
use crate::message::{Ending, JobOutcome, NodeMessage, Order, Round};
use crate::{ExitKind, NodeName, WorkerFailure};

const SIGKILL: ExitKind = ExitKind::Signal(9);

/// Orders to send, each with its node.
pub(super) type Orders = Vec<(usize, Order)>;

/// State of a node within a round.
#[derive(Debug, Clone, PartialEq)]
enum NodeState {
    /// It has not reported that it is ready for the next round.
    Awaited,
    Ready,
    Running,
    Ended,
    /// The connection to its launcher is closed.
    Gone,
}

/// Receives the messages of all nodes and decides.
pub(super) struct Coordinator {
    states: Vec<NodeState>,
    names: Vec<NodeName>,
    local_world_sizes: Vec<Option<usize>>,
    /// Minimum number of ranks of an elastic job, as configured on each node.
    elastic: Vec<Option<usize>>,
    /// Maximum number of restarts, as configured on each node.
    max_restarts: Vec<usize>,
    losses: Losses,
    round: Round,
    failures: Vec<Failed>,
    /// The first event that ends the job whatever the ranks do.
    end: Option<JobOutcome>,
    over: bool,
}

impl Coordinator {
    /// `hosts` are the addresses of the nodes, used until they report their host names.
    pub(super) fn new(hosts: Vec<String>, round: Round) -> Self {
        let nodes = hosts.len();
        let name = |(node, host)| NodeName { node, host };
        Self {
            states: vec![NodeState::Awaited; nodes],
            names: hosts.into_iter().enumerate().map(name).collect(),
            local_world_sizes: vec![None; nodes],
            elastic: vec![None; nodes],
            max_restarts: vec![0; nodes],
            losses: Losses::new(nodes),
            round,
            failures: Vec::new(),
            end: None,
            over: false,
        }
    }

    /// Processes a message from a node, and returns the orders to send now.
    pub(super) fn handle(&mut self, node: usize, message: NodeMessage, now: Instant) -> Orders {
        if self.over || self.states[node] == NodeState::Gone {
            return Vec::new();
        }
        match message {
            NodeMessage::Ready { host, local_world_size, port, elastic, max_restarts } => {
                self.names[node].host = host;
                self.local_world_sizes[node] = Some(local_world_size);
                self.elastic[node] = elastic;
                self.max_restarts[node] = max_restarts;
                if node == 0 {
                    self.round.port = port;
                }
                self.ready(node)
            }
            NodeMessage::Met { without } => self.met(without),
            NodeMessage::HasEnded(rank) => self.has_ended(node, rank),
            NodeMessage::Lost { failure, is_final } => self.lost(node, failure, is_final, now),
            NodeMessage::Failing { rank, status } => self.failing(node, rank, status),
            NodeMessage::LastLines { rank, lines } => {
                self.losses.keep_last_lines(node, rank, &lines);
                Vec::new()
            }
            NodeMessage::Ended(ending) => self.ended(node, ending, now),
            NodeMessage::Gone => self.gone(node, "is gone".into(), JobOutcome::Gone),
            NodeMessage::Silent { ms } => {
                let what =
                    format!("is given up: nothing was heard of its launcher for {:.1} s", ms as f64 / 1e3);
                self.gone(node, what, |node| JobOutcome::Silent { node, ms })
            }
        }
    }

    fn ready(&mut self, node: usize) -> Orders {
        self.states[node] = NodeState::Ready;
        if self.end.is_some() {
            return self.decide();
        }
        if self.states.iter().any(|state| *state != NodeState::Ready) {
            return Vec::new();
        }
        if let Some((odd, reason)) = self.first_config_mismatch() {
            self.end = Some(JobOutcome::Stopped { node: self.names[odd].clone(), reason });
            return self.decide();
        }
        self.states.fill(NodeState::Running);
        (0..self.states.len()).map(|node| (node, Order::Start(self.round.clone()))).collect()
    }

    /// Returns the first node whose configuration differs from node 0's, and the difference.
    fn first_config_mismatch(&self) -> Option<(usize, String)> {
        let size = |node: usize| self.local_world_sizes[node].unwrap_or_default().to_string();
        let least =
            |node: usize| self.elastic[node].map_or("nothing".into(), |min| format!("at least {min} ranks"));
        let differs = |node: &usize, value_of: &dyn Fn(usize) -> String| value_of(*node) != value_of(0);
        let restarts = |node: usize| self.max_restarts[node].to_string();
        let options: [(&str, &dyn Fn(usize) -> String); 3] =
            [("--nproc-per-node", &size), ("--elastic", &least), ("--max-restarts", &restarts)];
        options.into_iter().find_map(|(option, value_of)| {
            let odd = (0..self.names.len()).find(|node| differs(node, value_of))?;
            let (got, other, first) = (value_of(odd), value_of(0), &self.names[0]);
            Some((odd, format!("{option}: got {got}, {first} has {other}; give the same on every node")))
        })
    }

    /// A rank reports that the ranks have formed a group. Ranks that failed before this report arrived count as lost,
    /// like those that fail later: without them no group would have formed.
    fn met(&mut self, without: Vec<usize>) -> Orders {
        if !self.losses.met(without) || self.over {
            return self.check_remaining();
        }
        let ranks = self.losses.take_fatal();
        let nodes = self.end.take_if(|end| matches!(end, JobOutcome::Gone(_) | JobOutcome::Silent { .. }));
        if !self.are_enough() {
            self.end = self.end.take().or(nodes);
            self.losses.put_back(ranks);
            return Vec::new();
        }
        let said = ranks.iter().map(|(_, failed)| failed.failure.headline());
        let said: Vec<String> = said.chain(self.losses.early_nodes()).collect();
        said.into_iter().flat_map(|what| self.go_on(what)).collect()
    }

    /// Ends the job if too few ranks are left. A rank may have counted as lost while excluded ranks were still counted
    /// as members.
    fn check_remaining(&mut self) -> Orders {
        if self.over || self.are_enough() || self.has_failed() {
            return Vec::new();
        }
        let Some((node, failed)) = self.losses.take_last() else { return Vec::new() };
        self.losses.add_fatal(node, failed);
        self.stop()
    }

    /// A rank has failed in an elastic job, which may continue without it.
    fn lost(&mut self, node: usize, mut failure: WorkerFailure, is_final: bool, now: Instant) -> Orders {
        if self.states[node] != NodeState::Running {
            return Vec::new();
        }
        failure.node = Some(self.names[node].clone());
        let was_member = self.losses.add(failure.rank);
        // If all others have ended before, nobody is left to do this rank's part of the work.
        let was_last = was_member && self.losses.at_work(self.local_world_size()) == 0;
        let (rank, status, headline) = (failure.rank, failure.status, failure.headline());
        let failed = Failed { failure, at: now, is_final };
        if self.are_enough() && !was_last {
            self.losses.keep(node, failed);
            return self.go_on(headline);
        }
        self.losses.add_fatal(node, failed);
        let mut stop = self.stop();
        stop.retain(|(node, _)| self.losses.may_have_ranks(*node, self.local_world_size()));
        stop.extend(self.is_missed(node, rank, status));
        stop
    }

    /// A rank has failed, and the round cannot succeed any more.
    fn failing(&self, node: usize, rank: usize, status: ExitKind) -> Orders {
        self.stop().into_iter().chain(self.is_missed(node, rank, status)).collect()
    }

    /// Rank 0 may end because this rank is missing. Ranks that join only after that learn from the launcher of rank 0
    /// which rank is missing.
    fn is_missed(&self, node: usize, rank: usize, status: ExitKind) -> Option<(usize, Order)> {
        let is_its_own = rank.checked_div(self.local_world_size()) == Some(node);
        let by_itself = status != ExitKind::Code(EXIT_PEER_FAILED) && !self.losses.has_met();
        let is_elsewhere = node > 0 && matches!(self.states[0], NodeState::Running | NodeState::Ended);
        let host = || self.names[node].host.clone();
        (is_its_own && by_itself && is_elsewhere).then(|| (0, Order::IsMissed { rank, host: host() }))
    }

    /// A launcher has seen a process end. A message counts only for the sender's own ranks: about the ranks of an
    /// unreachable node nothing is known.
    fn has_ended(&mut self, node: usize, rank: usize) -> Orders {
        let is_its_own = self.states.len() == 1 || rank.checked_div(self.local_world_size()) == Some(node);
        if is_its_own {
            self.losses.add_end(rank);
        }
        let running = self.those_at(|state| *state == NodeState::Running).filter(|_| is_its_own);
        running.map(|node| (node, Order::HasEnded(rank))).collect()
    }

    /// A node's launcher is gone, and its ranks with it.
    fn gone(&mut self, node: usize, how: String, outcome: impl Fn(NodeName) -> JobOutcome) -> Orders {
        let state = std::mem::replace(&mut self.states[node], NodeState::Gone);
        let what = format!("{} {how}", self.names[node]);
        self.go_on_without(node, &state, what.clone()).unwrap_or_else(|| {
            self.losses.note_early(what.clone());
            // If a rank had failed by itself before, it is the cause. That there can be no restart without this node is
            // only a note.
            let said = match self.first_cause() {
                Some(cause) if cause.is_own() && self.end.is_none() => self.tell_all(&Order::Note(what)),
                _ => {
                    self.end.get_or_insert(outcome(self.names[node].clone()));
                    Vec::new()
                }
            };
            said.into_iter().chain(self.decide()).collect()
        })
    }

    /// Whether the connection to a node's launcher is closed.
    pub(super) fn is_gone(&self, node: usize) -> bool {
        self.states[node] == NodeState::Gone
    }

    pub(super) fn name(&self, node: usize) -> &NodeName {
        &self.names[node]
    }

    /// Returns the orders if the others can continue without this node, whose state was `state`.
    fn go_on_without(&mut self, node: usize, state: &NodeState, what: String) -> Option<Orders> {
        if *state == NodeState::Running {
            self.losses.add_node(node);
        }
        let has_begun = matches!(state, NodeState::Running | NodeState::Ended);
        if !has_begun || !self.are_enough() {
            return None;
        }
        let mut orders = if *state == NodeState::Running { self.go_on(what) } else { Vec::new() };
        orders.extend(self.decide());
        Some(orders)
    }

    fn local_world_size(&self) -> usize {
        self.local_world_sizes[0].unwrap_or_default()
    }

    /// Whether enough ranks are left to continue.
    fn are_enough(&self) -> bool {
        let local = self.local_world_size();
        !self.has_failed() && self.elastic[0].is_some_and(|min| self.losses.can_go_on(local, min))
    }

    /// Whether the round can no longer succeed, whatever the ranks do.
    fn has_failed(&self) -> bool {
        self.end.is_some() || !self.failures.is_empty() || self.losses.fatal().next().is_some()
    }

    /// Orders that announce the loss to all nodes whose launchers are connected.
    fn go_on(&self, what: String) -> Orders {
        let left = match self.losses.left(self.local_world_size()) {
            1 => "the other goes on".to_string(),
            left => format!("the others go on, {left} in all"),
        };
        self.tell_all(&Order::GoOn(format!("{what}; {left}")))
    }

    fn tell_all(&self, order: &Order) -> Orders {
        let there = self.those_at(|state| matches!(state, NodeState::Running | NodeState::Ended));
        there.map(|node| (node, order.clone())).collect()
    }

    fn ended(&mut self, node: usize, ending: Ending, now: Instant) -> Orders {
        let before = std::mem::replace(&mut self.states[node], NodeState::Ended);
        match ending {
            Ending::Done => {}
            Ending::Failed { mut failure, ago_ms, is_final } => {
                failure.node = (self.names.len() > 1).then(|| self.names[node].clone());
                let at = now.checked_sub(Duration::from_millis(ago_ms)).unwrap_or(now);
                self.losses.drop_fatal_of(node);
                self.failures.push(Failed { failure, at, is_final });
            }
            Ending::Stopped(reason) => return self.stopped(node, &before, reason),
        }
        self.decide()
    }

    /// A node's launcher has ended its ranks for a reason of its own. Without the first node's launcher the job ends.
    fn stopped(&mut self, node: usize, before: &NodeState, reason: String) -> Orders {
        let (name, what) = (self.names[node].clone(), format!("{} has left: {reason}", self.names[node]));
        let outcome = JobOutcome::Stopped { node: name, reason };
        if node > 0 {
            let state = std::mem::replace(&mut self.states[node], NodeState::Gone);
            if let Some(mut orders) = self.go_on_without(node, before, what) {
                orders.push((node, Order::Over(outcome)));
                return orders;
            }
            self.states[node] = state;
        }
        self.end.get_or_insert(outcome);
        self.decide()
    }

    /// Orders to stop, for all nodes whose ranks still run.
    fn stop(&self) -> Orders {
        self.those_at(|state| *state == NodeState::Running).map(|node| (node, Order::Stop)).collect()
    }

    fn those_at(&self, is: impl Fn(&NodeState) -> bool) -> impl Iterator<Item = usize> {
        let nodes: Vec<usize> = (0..self.states.len()).filter(|&node| is(&self.states[node])).collect();
        nodes.into_iter()
    }

    /// Decides on a restart or on the outcome, once no rank runs any more.
    fn decide(&mut self) -> Orders {
        let runs = |state: &NodeState| *state == NodeState::Running;
        if self.states.iter().any(runs) {
            return if self.has_failed() { self.stop() } else { Vec::new() };
        }
        let outcome = match (self.end.take(), self.first_cause()) {
            (Some(end), _) => end,
            (None, None) => JobOutcome::Done,
            (None, Some(Failed { failure, is_final, .. })) => {
                let all_are_there = !self.states.contains(&NodeState::Gone);
                if self.round.restart < self.round.max_restarts && !is_final && all_are_there {
                    return self.again(&failure);
                }
                JobOutcome::Failed(failure)
            }
        };
        self.over = true;
        let here = self.those_at(|state| *state != NodeState::Gone);
        here.map(|node| (node, Order::Over(outcome.clone()))).collect()
    }

    fn again(&mut self, failure: &WorkerFailure) -> Orders {
        self.failures.clear();
        self.losses = Losses::new(self.states.len());
        self.states.fill(NodeState::Awaited);
        self.round.restart += 1;
        let order = Order::Again {
            reason: failure.headline(),
            restart: self.round.restart,
            of: self.round.max_restarts,
        };
        (0..self.states.len()).map(|node| (node, order.clone())).collect()
    }

    /// Returns the first cause, by the same rule as on one node: the earliest failure that is not attributed to another
    /// rank, except that a SIGKILL from outside takes precedence where times are close.
    fn first_cause(&self) -> Option<Failed> {
        let earliest = |failures: Vec<&Failed>| failures.into_iter().min_by_key(|failed| failed.at).cloned();
        let all: Vec<&Failed> = self.failures.iter().chain(self.losses.fatal()).collect();
        let cause = earliest(all.iter().copied().filter(|failed| failed.is_own()).collect())
            .or_else(|| earliest(all.clone()))?;
        let killed =
            |failed: &&Failed| failed.failure.status == SIGKILL && failed.at < cause.at + KILL_PRECEDENCE;
        let mut cause = all.iter().copied().find(killed).cloned().unwrap_or(cause);
        let of_node = |failed: &&Failed| failed.failure.also_failed.saturating_add(1);
        let count = all.iter().map(of_node).fold(0, usize::saturating_add);
        cause.failure.also_failed = count - 1;
        Some(cause)
    }
}

#[cfg(test)]
mod tests;
