//! Control connections of rank 0: detects deaths, queries the ranks, chooses a cause, and sends the same cause to all.
//!
//! However many ranks have questions, each rank is asked once what it is doing: all questions that have arrived are
//! answered in one round, and those that arrive meanwhile in the next.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFd;

use crate::base::cause::Cause;
use crate::connection::poll_thread::Polled;
use crate::failure::diagnosis::{Question, Status, choose_cause, may_change};

use super::connections::{Connections, ControlLinks};
use super::failure_state::{FailureState, PROBE_TIMEOUT};
use super::wire::{ControlMessage, Wire};
use crate::Result;

/// Pause before a new round, when the answers of ranks that were just asked may soon change.
const PAUSE: Duration = Duration::from_millis(20);

/// Rank 0 of the control connections, without sockets.
pub(super) struct Coordinator<L = Connections> {
    failure_state: Arc<FailureState>,
    connections: L,
    /// The time of what happens now.
    pub(super) now: Instant,
    /// By rank.
    members: Vec<MemberControl>,
    inquiries: Vec<Inquiry>,
    round: Option<Round>,
    rounds: u64,
    /// When the next round may begin.
    not_before: Instant,
}

/// Permanent state of a rank.
#[derive(Default)]
struct MemberControl {
    left: bool,
    /// Why it left, if its program has said so, or another group of the job has failed.
    because: Option<Cause>,
    /// Since when it owes an answer. It is not asked again until it has answered.
    asked: Option<Instant>,
}

/// A question that waits for the ranks' reports.
struct Inquiry {
    asker: usize,
    id: u64,
    question: Question,
    deadline: Instant,
    /// It arrived before the round began, and is answered by it.
    in_round: bool,
}

/// One round of asking all ranks what they are doing.
struct Round {
    number: u64,
    /// By rank. `None` if it has not answered yet.
    statuses: Vec<Option<Status>>,
    /// The ranks that owe an answer and have not died.
    owing: BTreeSet<usize>,
    /// When it began, if any rank was asked then: all may owe an answer to the round before.
    asked: Option<Instant>,
}

impl Polled for Coordinator<Connections> {
    fn watch<'a>(&'a self, fds: &mut Vec<PollFd<'a>>) {
        self.connections.watch(fds);
    }

    fn due(&self) -> Option<Instant> {
        self.next_deadline().into_iter().chain(self.failure_state.death_log_at()).min()
    }

    /// Serves until the group is closed.
    fn act(&mut self, ready: &[bool]) -> bool {
        self.now = Instant::now();
        if let Some(closing) = self.failure_state.closing() {
            if closing.goodbye {
                let progress = self.failure_state.progress();
                let because = self.failure_state.reason_to_leave();
                self.connections.write_all(&ControlMessage::Goodbye { progress, because });
            }
            return false;
        }
        self.failure_state.log_death();
        for (id, question) in self.failure_state.take_questions() {
            self.inquire(0, id, question);
        }
        if ready.contains(&true) {
            self.connections.ready().into_iter().for_each(|rank| self.listen(rank));
        }
        // A rank has its time from when it is asked, however long reading has taken.
        self.now = Instant::now();
        self.advance();
        true
    }
}

impl Coordinator<Connections> {
    /// # Errors
    /// If the system lacks the resources to watch the connections.
    pub(super) fn of_wires(failure_state: Arc<FailureState>, wires: Vec<Option<Wire>>) -> Result<Self> {
        let world_size = wires.len();
        Ok(Self::new(failure_state, Connections::new(wires)?, world_size, Instant::now()))
    }

    fn listen(&mut self, rank: usize) {
        if let Some((messages, ended)) = self.connections.read(rank) {
            self.receive(rank, messages, ended.is_err());
        }
    }
}

impl<L: ControlLinks> Coordinator<L> {
    pub(super) fn new(
        failure_state: Arc<FailureState>,
        connections: L,
        world_size: usize,
        now: Instant,
    ) -> Self {
        let members = (0..world_size).map(|_| MemberControl::default()).collect();
        let (inquiries, round, rounds) = (Vec::new(), None, 0);
        Self { failure_state, connections, now, members, inquiries, round, rounds, not_before: now }
    }

    /// Returns when to wake even if no message arrives.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        match &self.round {
            // What matters is when the last of them has had its time.
            Some(round) => match round.asked.map(|asked| asked + PROBE_TIMEOUT) {
                Some(until) if self.now < until && !round.owing.is_empty() => Some(until),
                _ => Some(self.awaited(round).max().map_or(self.not_before, |asked| asked + PROBE_TIMEOUT)),
            },
            None if self.inquiries.is_empty() => None,
            None => Some(self.not_before),
        }
    }

    /// Returns, for each rank that still owes an answer, when it was asked.
    fn awaited(&self, round: &Round) -> impl Iterator<Item = Instant> {
        round.owing.iter().filter_map(|rank| self.members[*rank].asked)
    }

    /// Receives what a rank has sent; `gone`: its connection has ended after that.
    pub(super) fn receive(&mut self, rank: usize, messages: Vec<ControlMessage>, mut gone: bool) {
        for message in messages {
            match message {
                ControlMessage::Ask { id, question } if question.peer() < self.members.len() => {
                    self.inquire(rank, id, question)
                }
                ControlMessage::Doing { inquiry, activity } => {
                    self.receive_report(rank, inquiry, Status::Active(activity))
                }
                ControlMessage::Goodbye { because, .. } => {
                    let because = because.map(|cause| self.failure_state.converted_from_group(cause));
                    (self.members[rank].left, self.members[rank].because) = (true, because);
                    gone = true;
                }
                _ => gone = true,
            }
        }
        if gone {
            self.connections.close(rank);
            if let Some(round) = &mut self.round {
                round.owing.remove(&rank);
            }
            if !self.members[rank].left {
                self.fail_group(Cause::Died { rank });
            }
        }
    }

    fn inquire(&mut self, asker: usize, id: u64, question: Question) {
        if question.is_fatal() && self.failure_state.has_failed() {
            // The asker has been sent the first cause, as all have.
            return;
        }
        let deadline = self.now + PROBE_TIMEOUT;
        self.inquiries.push(Inquiry { asker, id, question, deadline, in_round: false });
    }

    /// Receives a rank's report, for this round or, if it is late, for an earlier one. A late rank is asked again for
    /// this round.
    fn receive_report(&mut self, rank: usize, number: u64, status: Status) {
        self.members[rank].asked = None;
        match &mut self.round {
            Some(round) if round.number == number => {
                round.statuses[rank] = Some(status);
                round.owing.remove(&rank);
            }
            Some(_) => self.ask(rank),
            None => {}
        }
    }

    /// Asks one rank for this round, which then owes an answer.
    fn ask(&mut self, rank: usize) {
        if self.connections.is_open(rank) {
            self.connections.write(rank, &ControlMessage::Probe { inquiry: self.rounds });
            self.members[rank].asked = Some(self.now);
        }
    }

    /// Asks every rank what it is doing.
    fn begin_round(&mut self) {
        self.rounds += 1;
        let ranks = 0..self.members.len();
        let statuses = ranks.clone().map(|_| None).collect();
        let owing: BTreeSet<usize> = ranks.filter(|rank| self.connections.is_open(*rank)).collect();
        let free = owing.iter().copied().filter(|rank| self.members[*rank].asked.is_none());
        let free: Vec<usize> = free.collect();
        let asked = (!free.is_empty()).then_some(self.now);
        self.round = Some(Round { number: self.rounds, statuses, owing, asked });
        self.inquiries.iter_mut().for_each(|inquiry| inquiry.in_round = true);
        free.into_iter().for_each(|rank| self.ask(rank));
    }

    /// Judges when all ranks have answered or their time is over, and begins a new round if there are questions.
    pub(super) fn advance(&mut self) {
        let now = self.now;
        let is_over = |round: &Round| self.awaited(round).all(|asked| now >= asked + PROBE_TIMEOUT);
        let over = self.round.as_ref().is_some_and(is_over);
        if let Some(round) = self.round.take_if(|_| over) {
            self.judge(&round, now);
        }
        if self.round.is_none() && !self.inquiries.is_empty() && now >= self.not_before {
            self.begin_round();
        }
    }

    fn judge(&mut self, round: &Round, now: Instant) {
        let statuses: Vec<Status> =
            round.statuses.iter().enumerate().map(|(rank, said)| self.status(rank, said)).collect();
        // The answer to the most frequent question when all ranks wait: it does not depend on the asker.
        let mut usual: Option<Option<Cause>> = None;
        for inquiry in std::mem::take(&mut self.inquiries) {
            let Inquiry { asker, id, ref question, deadline, in_round } = inquiry;
            // The first cause is sent to all, whatever they ask.
            if question.is_fatal() && self.failure_state.has_failed() {
                continue;
            }
            if !in_round {
                self.inquiries.push(inquiry);
                continue;
            }
            let cause = match question {
                Question::Stuck { peer, last: false, .. } if statuses[*peer] != Status::Left => {
                    usual.get_or_insert_with(|| choose_cause(asker, question, &statuses)).clone()
                }
                _ => choose_cause(asker, question, &statuses),
            };
            let cause = cause.map(|cause| self.cause_of_leaving(cause));
            // The reason comes with the goodbye of a rank that leaves.
            let is_open = |cause: &Cause| may_change(cause, &statuses) || cause.lacks_reason();
            if now < deadline && cause.as_ref().is_some_and(is_open) {
                self.not_before = now + PAUSE;
                self.inquiries.push(inquiry);
                continue;
            }
            match cause {
                Some(cause) if question.is_fatal() => self.fail_group(cause),
                cause => self.answer(asker, id, cause),
            }
        }
    }

    fn status(&self, rank: usize, said: &Option<Status>) -> Status {
        match said {
            _ if rank == 0 => Status::Active(self.failure_state.activity()),
            _ if self.members[rank].left => Status::Left,
            Some(status) => status.clone(),
            None if self.connections.is_open(rank) => Status::Silent,
            None => Status::Died,
        }
    }

    /// A rank that has left because of a failure in another group is not the cause itself.
    fn cause_of_leaving(&self, cause: Cause) -> Cause {
        match cause {
            // The rank number was sent by another rank, and may be invalid.
            Cause::Left { rank } => {
                self.members.get(rank).and_then(|member| member.because.clone()).unwrap_or(cause)
            }
            cause => cause.with_reason(self.members.iter().filter_map(|member| member.because.as_ref())),
        }
    }

    fn answer(&mut self, asker: usize, id: u64, cause: Option<Cause>) {
        match asker {
            0 => self.failure_state.answer(id, cause),
            _ => self.connections.write(asker, &ControlMessage::Answer { id, cause }),
        }
    }

    /// Fails the group with this cause. Later causes are ignored.
    fn fail_group(&mut self, cause: Cause) {
        if self.failure_state.has_failed() {
            return;
        }
        // The other ranks first: once this rank knows, its process may end, and would appear to be the cause.
        self.connections.write_all(&ControlMessage::Verdict(cause.clone()));
        self.failure_state.fail(cause);
        // All have been told: nobody has to be asked for those that ask.
        self.inquiries.retain(|inquiry| !inquiry.question.is_fatal());
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use std::os::fd::AsFd;

    use rustix::event::{PollFlags, poll};

    use super::*;
    use crate::TcpConfig;
    use crate::base::members::Members;
    use crate::base::timespec::timespec;
    use crate::connection::stream::Stream;
    use crate::failure::supervisor::Supervisor;
    use crate::transport::tcp::connections::DataConnections;

    const LONG: Duration = Duration::from_secs(60);

    /// Rank 0 of a group of `world_size` ranks, without data connections.
    fn office(world_size: usize) -> Arc<FailureState> {
        let config = TcpConfig { world_size, ..TcpConfig::default() };
        let data_connections = DataConnections::with(0, (0..world_size).map(|_| None).collect());
        Arc::new(FailureState::new(&config, Members::world(world_size), data_connections, Arc::default()))
    }

    fn pair() -> [Wire; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [listener.accept().unwrap().0, there].map(|socket| {
            socket.set_nonblocking(true).unwrap();
            Wire::new(Arc::new(Stream::from(socket)))
        })
    }

    /// Waits for the verdict sent to a rank, and returns it.
    fn verdict(wire: &mut Wire) -> Cause {
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < LONG);
            let (messages, ended) = wire.read();
            let said =
                |message| if let ControlMessage::Verdict(cause) = message { Some(cause) } else { None };
            if let Some(cause) = messages.into_iter().find_map(said) {
                return cause;
            }
            ended.unwrap();
            let mut polled = [PollFd::from_borrowed_fd(wire.stream().as_fd(), PollFlags::IN)];
            poll(&mut polled, Some(&timespec(LONG))).unwrap();
        }
    }

    #[test]
    fn a_rank_that_there_is_not_does_no_harm() {
        let failure_state = office(2);
        let [here, mut there] = pair();
        let cause = Cause::Left { rank: 9 };
        let coordinator = Coordinator::of_wires(failure_state.clone(), vec![None, Some(here)]).unwrap();
        let served = failure_state.job().thread().serve(Box::new(coordinator)).unwrap();
        there.write(&ControlMessage::Ask {
            id: 1,
            question: Question::Known { peer: 0, cause: cause.clone() },
        });
        assert_eq!(verdict(&mut there), cause);
        failure_state.close(false);
        served.wait();
        let error = failure_state.error(&failure_state.failure().unwrap(), "barrier #1".into());
        assert!(error.to_string().starts_with("rank 9 (host ) left the group"), "{error}");
    }

    #[test]
    fn that_others_go_too_does_not_keep_rank_0_from_saying_that_one_has_died() {
        let failure_state = office(3);
        let mut center =
            Coordinator::of_wires(failure_state.clone(), (0..3).map(|_| None).collect()).unwrap();
        center.fail_group(Cause::Died { rank: 1 });
        center.fail_group(Cause::Died { rank: 2 });
        assert!(failure_state.death_log_at().is_some());
        // The call to `failure` counts as an operation that knows.
        assert_eq!(failure_state.failure(), Some(Cause::Died { rank: 1 }));
        assert!(failure_state.death_log_at().is_none());
    }

    #[test]
    fn an_announced_reason_is_in_the_goodbye_whatever_failed_before_and_was_called_since() {
        let failure_state = office(3);
        let [here, mut there] = pair();
        let healthy = FailureState::new(
            &TcpConfig { world_size: 2, ..TcpConfig::default() },
            Members::world(2),
            DataConnections::with(0, vec![None, None]),
            failure_state.job().clone(),
        );
        failure_state.fail(Cause::Died { rank: 2 });
        healthy.announce_failure("the disk is full");
        // The program knows of the failure, and calls on.
        assert!(failure_state.failure().is_some());
        healthy.on_program_call();
        failure_state.close(true);
        let mut coordinator = Coordinator::of_wires(failure_state, vec![None, Some(here), None]).unwrap();
        assert!(!coordinator.act(&[]));
        let (messages, _) = there.read();
        let because = Some(Cause::program(0, "the disk is full"));
        assert!(
            matches!(&messages[..], [ControlMessage::Goodbye { because: told, .. }] if *told == because),
            "{messages:?}"
        );
    }

    #[test]
    fn who_waits_in_another_group_is_not_said_to_have_called_nothing() {
        let failure_state = office(3);
        let idle = "rank 0 has called nothing since rank 1 (host here) died: its next operation fails";
        assert_eq!(failure_state.death_text(1), idle);
        let call = "rendezvous in the group [0, 2]".to_string();
        let meets = failure_state.job().begin_formation(&failure_state, call, vec![2]).unwrap();
        assert_eq!(
            failure_state.death_text(1),
            "rank 1 (host here) has died, and rank 0 is still in rendezvous in the group [0, 2]"
        );
        drop(meets);
        assert_eq!(failure_state.death_text(1), idle);
    }
}
