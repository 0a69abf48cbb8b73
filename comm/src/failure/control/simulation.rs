//! Ten thousand ranks detect failures, by the state machines that run, over a model of a network: what it takes in messages, bytes
//! and time.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::connections::{ControlLink, ControlLinks};
use super::coordinator::Coordinator;
use super::failure_state::{FailureState, PROBE_TIMEOUT};
use super::member::Member;
use super::wire::ControlMessage;
use crate::TcpConfig;
use crate::base::cause::Cause;
use crate::base::members::Members;
use crate::base::network_model::{LinkModel, Network};
use crate::failure::diagnosis::Question;
use crate::failure::supervisor::Supervisor;
use crate::transport::tcp::connections::DataConnections;

const RANKS: usize = 10_000;
/// 1 Gbit/s, between two racks.
const LINK: LinkModel = LinkModel { latency: Duration::from_millis(1), bytes_per_second: 125e6 };

/// What arrives at a rank.
enum Arrival {
    Message(usize, Box<ControlMessage>),
    /// The end of a rank's connection.
    End(usize),
    /// Rank 0 is to act, though nothing has come.
    Due,
}

/// What a rank has sent and the network has not taken yet: to which rank, and what.
#[derive(Clone, Default)]
struct Outbox(Arc<Mutex<Vec<(usize, ControlMessage)>>>);

impl ControlLink for Outbox {
    fn write(&mut self, message: &ControlMessage) {
        self.0.lock().unwrap().push((0, message.clone()));
    }
}

/// Connections of rank 0.
struct Star {
    open: Vec<bool>,
    outbox: Outbox,
}

impl ControlLinks for Star {
    fn is_open(&self, rank: usize) -> bool {
        self.open[rank]
    }

    fn close(&mut self, rank: usize) {
        self.open[rank] = false;
    }

    fn write(&mut self, rank: usize, message: &ControlMessage) {
        if self.open[rank] {
            self.outbox.0.lock().unwrap().push((rank, message.clone()));
        }
    }

    fn write_all(&mut self, message: &ControlMessage) {
        (0..self.open.len()).for_each(|rank| self.write(rank, message));
    }
}

struct Job {
    began: Instant,
    network: Network<Arrival>,
    coordinator: Coordinator<Star>,
    members: Vec<Member<Outbox>>,
    /// By rank.
    states: Vec<Arc<FailureState>>,
    outbox: Outbox,
    /// A rank that is stopped: nothing comes from it.
    stopped: Option<usize>,
    /// When rank 0 is to act next.
    due: Option<Duration>,
}

impl Job {
    fn new() -> Self {
        let (connections, job) = (DataConnections::with(0, vec![None]), Arc::default());
        let members = Members::world(RANKS);
        let state = |rank| {
            let config = TcpConfig { rank, world_size: RANKS, ..TcpConfig::default() };
            Arc::new(FailureState::new(&config, members.clone(), connections.clone(), Arc::clone(&job)))
        };
        let states: Vec<_> = (0..RANKS).map(state).collect();
        let (began, outbox) = (Instant::now(), Outbox::default());
        let star = Star { open: (0..RANKS).map(|rank| rank > 0).collect(), outbox: outbox.clone() };
        Self {
            began,
            network: Network::new(RANKS, LINK),
            coordinator: Coordinator::new(states[0].clone(), star, RANKS, began),
            members: states.iter().map(|state| Member::new(state.clone(), Some(outbox.clone()))).collect(),
            states,
            outbox,
            stopped: None,
            due: None,
        }
    }

    /// Passes to the network what `rank` has sent.
    fn send(&mut self, rank: usize) {
        for (to, message) in std::mem::take(&mut *self.outbox.0.lock().unwrap()) {
            let bytes = serde_json::to_vec(&message).unwrap().len() + 1;
            self.network.send(rank, to, bytes, Arrival::Message(rank, Box::new(message)));
        }
    }

    /// Lets everything happen until all is quiet.
    fn run(&mut self) {
        while let Some((at, arrival)) = self.network.next() {
            if Some(at) == self.stopped {
                continue;
            }
            if at > 0 {
                let Arrival::Message(_, message) = arrival else { continue };
                self.members[at].receive(vec![*message], false);
                self.send(at);
                continue;
            }
            self.coordinator.now = self.began + self.network.now();
            match arrival {
                Arrival::Message(from, message) => self.coordinator.receive(from, vec![*message], false),
                Arrival::End(rank) => self.coordinator.receive(rank, Vec::new(), true),
                Arrival::Due => self.due = None,
            }
            self.coordinator.advance();
            self.send(0);
            // As the poll thread does.
            let due = self.coordinator.next_deadline().map(|due| due - self.began);
            if let Some(due) = due.filter(|due| self.due.is_none_or(|known| *due < known)) {
                self.due = Some(due);
                self.network.at(due.max(self.network.now()), 0, Arrival::Due);
            }
        }
    }

    /// Returns the cause that all ranks but this one have heard.
    fn cause_without(&self, rank: usize) -> Cause {
        let causes = self.states.iter().enumerate().filter(|(other, _)| *other != rank);
        let mut causes = causes.map(|(other, state)| (other, state.failure()));
        let (_, first) = causes.next().unwrap();
        assert!(causes.all(|(_, cause)| cause == first), "all say the same");
        first.unwrap()
    }
}

#[test]
fn a_death_is_known_to_all_by_one_message_each() {
    let mut job = Job::new();
    let dead = 7_777;
    job.network.at(LINK.latency, 0, Arrival::End(dead));
    job.run();
    assert_eq!(job.cause_without(dead), Cause::Died { rank: dead });
    let [messages, bytes] = job.network.sent();
    assert_eq!(messages, RANKS - 2);
    assert!(bytes < 40 * RANKS, "{bytes} bytes");
    // 0.3 MB over rank 0's link, and the latency twice.
    assert!(job.network.now() < Duration::from_millis(10), "{:?}", job.network.now());
}

#[test]
fn who_stands_still_is_found_by_one_round_however_many_ask() {
    let (stopped, askers) = (4_242, 1_000);
    let mut job = Job::new();
    job.stopped = Some(stopped);
    for asker in (1..RANKS).step_by(RANKS / askers) {
        let question = Question::Stuck { peer: stopped, last: true, apart: false };
        let message = ControlMessage::Ask { id: 1, question };
        let bytes = serde_json::to_vec(&message).unwrap().len() + 1;
        job.network.send(asker, 0, bytes, Arrival::Message(asker, Box::new(message)));
    }
    job.run();
    let cause = job.cause_without(stopped);
    assert!(matches!(cause, Cause::Stalled { rank, .. } if rank == stopped), "{cause:?}");
    // Each is asked once, all but one answer, and all are told.
    let [messages, bytes] = job.network.sent();
    assert_eq!(messages, askers + (RANKS - 1) + (RANKS - 2) + (RANKS - 1));
    assert!(bytes < 400 * RANKS, "{bytes} bytes");
    // That rank's time to answer is most of it: within the second that is promised.
    let time = job.network.now();
    assert!(time > PROBE_TIMEOUT && time < PROBE_TIMEOUT + Duration::from_millis(100), "{time:?}");
}
