//! The control thread of rank 0: it sees who dies, asks around, judges, and tells everybody the same cause.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::supervisor::Supervisor;
use crate::tcp::links::timespec;
use crate::verdict::{Cause, Question, Status, judge, may_change};

use super::bureau::{Bureau, PROBE_PATIENCE};
use super::leaf::drain;
use super::wire::{Message, Wire};

/// How long to leave ranks alone that were asked and may soon have something else to say.
const PAUSE: Duration = Duration::from_millis(20);

pub(super) struct Center<'a> {
    bureau: &'a Bureau,
    ear: &'a UnixStream,
    members: Vec<Member>,
    inquiries: Vec<Inquiry>,
    next_inquiry: u64,
}

/// What is known of a rank for good.
struct Member {
    wire: Option<Wire>,
    left: bool,
}

/// A question whose answer waits for what the ranks say they are doing.
struct Inquiry {
    number: u64,
    asker: usize,
    id: u64,
    question: Question,
    /// By rank; None where it has not answered yet.
    statuses: Vec<Option<Status>>,
    /// By rank: it was asked and has not answered.
    asked: Vec<bool>,
    deadline: Instant,
    /// Where ranks are still on their way to the call in question.
    ask_again: Option<Instant>,
}

impl<'a> Center<'a> {
    pub(super) fn new(bureau: &'a Bureau, ear: &'a UnixStream, wires: Vec<Option<Wire>>) -> Self {
        let members = wires.into_iter().map(|wire| Member { wire, left: false }).collect();
        Self { bureau, ear, members, inquiries: Vec::new(), next_inquiry: 0 }
    }

    /// Serves until the group is closed.
    pub(super) fn serve(mut self) {
        let closing = loop {
            if let Some(closing) = self.bureau.closing() {
                break closing;
            }
            let ready = self.sleep();
            drain(self.ear);
            for (id, question) in self.bureau.take_questions() {
                self.inquire(0, id, question);
            }
            for rank in ready {
                self.listen(rank);
            }
            self.settle();
        };
        if closing.goodbye {
            self.tell_all(&Message::Goodbye { progress: self.bureau.activity().progress() });
        }
    }

    /// The ranks that have something to say.
    fn sleep(&self) -> Vec<usize> {
        let wires = self.members.iter().enumerate();
        let live: Vec<(usize, &Wire)> =
            wires.filter_map(|(rank, member)| Some((rank, member.wire.as_ref()?))).collect();
        let mut polled = vec![PollFd::from_borrowed_fd(self.ear.as_fd(), PollFlags::IN)];
        polled.extend(
            live.iter().map(|(_, wire)| PollFd::from_borrowed_fd(wire.stream().as_fd(), PollFlags::IN)),
        );
        let next = self.inquiries.iter().map(|i| i.ask_again.unwrap_or(i.deadline).min(i.deadline)).min();
        let timeout = next.map(|deadline| {
            timespec(deadline.saturating_duration_since(Instant::now()) + Duration::from_millis(1))
        });
        if poll(&mut polled, timeout.as_ref()).is_err() {
            return Vec::new();
        }
        let spoke = |(polled, (rank, _)): (&PollFd<'_>, (usize, &Wire))| {
            (!polled.revents().is_empty()).then_some(rank)
        };
        polled[1..].iter().zip(live).filter_map(spoke).collect()
    }

    fn listen(&mut self, rank: usize) {
        let Some(wire) = &mut self.members[rank].wire else { return };
        let (messages, ended) = wire.read();
        let mut gone = ended.is_err();
        for message in messages {
            match message {
                Message::Ask { id, question } if question.peer() < self.members.len() => {
                    self.inquire(rank, id, question)
                }
                Message::Doing { inquiry, activity } => {
                    if let Some(inquiry) = self.inquiries.iter_mut().find(|known| known.number == inquiry) {
                        inquiry.statuses[rank] = Some(Status::Active(activity));
                        inquiry.asked[rank] = false;
                    }
                }
                Message::Goodbye { .. } => {
                    self.members[rank].left = true;
                    gone = true;
                }
                _ => gone = true,
            }
        }
        if gone {
            self.members[rank].wire = None;
            if !self.members[rank].left {
                self.declare(Cause::Died { rank });
            }
        }
    }

    /// Asks every rank what it is doing.
    fn inquire(&mut self, asker: usize, id: u64, question: Question) {
        let number = self.next_inquiry;
        self.next_inquiry += 1;
        let statuses = vec![None; self.members.len()];
        let deadline = Instant::now() + PROBE_PATIENCE;
        let asked = vec![true; self.members.len()];
        self.inquiries.push(Inquiry {
            number,
            asker,
            id,
            question,
            statuses,
            asked,
            deadline,
            ask_again: None,
        });
        self.tell_all(&Message::Probe { inquiry: number });
    }

    /// Judges where everybody has answered, or has had the time to.
    fn settle(&mut self) {
        let now = Instant::now();
        for index in (0..self.inquiries.len()).rev() {
            if !self.is_due(index, now) {
                continue;
            }
            let inquiry = &self.inquiries[index];
            let statuses: Vec<Status> =
                inquiry.statuses.iter().enumerate().map(|(rank, said)| self.status(rank, said)).collect();
            let cause = judge(inquiry.asker, &inquiry.question, &statuses);
            if now < inquiry.deadline && cause.as_ref().is_some_and(|cause| may_change(cause, &statuses)) {
                self.inquiries[index].ask_again = Some(now + PAUSE);
                continue;
            }
            let inquiry = self.inquiries.swap_remove(index);
            match cause {
                Some(cause) if inquiry.question.is_fatal() => self.declare(cause),
                cause => self.answer(inquiry.asker, inquiry.id, cause),
            }
        }
    }

    /// False where there is time left and answers are to come; asks once more where that is due.
    fn is_due(&mut self, index: usize, now: Instant) -> bool {
        let Self { inquiries, members, .. } = self;
        let inquiry = &mut inquiries[index];
        if now >= inquiry.deadline {
            return true;
        }
        match inquiry.ask_again {
            Some(at) if now < at => false,
            Some(_) => {
                inquiry.ask_again = None;
                inquiry.asked.fill(true);
                let probe = Message::Probe { inquiry: inquiry.number };
                self.tell_all(&probe);
                false
            }
            None => {
                !members.iter().zip(&inquiry.asked).any(|(member, asked)| *asked && member.wire.is_some())
            }
        }
    }

    fn status(&self, rank: usize, said: &Option<Status>) -> Status {
        match said {
            _ if rank == 0 => Status::Active(self.bureau.activity()),
            _ if self.members[rank].left => Status::Left,
            Some(status) => status.clone(),
            None if self.members[rank].wire.is_some() => Status::Silent,
            None => Status::Died,
        }
    }

    fn answer(&mut self, asker: usize, id: u64, cause: Option<Cause>) {
        match &mut self.members[asker].wire {
            _ if asker == 0 => self.bureau.answer(id, cause),
            Some(wire) => wire.write(&Message::Answer { id, cause }),
            None => {}
        }
    }

    /// The first cause is the cause.
    fn declare(&mut self, cause: Cause) {
        if self.bureau.failure().is_some() {
            return;
        }
        // The others first: when this rank knows, its process may end, and would seem to be the cause.
        self.tell_all(&Message::Verdict(cause.clone()));
        self.bureau.fail(cause);
    }

    fn tell_all(&mut self, message: &Message) {
        self.members
            .iter_mut()
            .filter_map(|member| member.wire.as_mut())
            .for_each(|wire| wire.write(message));
    }
}
