//! The control thread of rank 0: it sees who dies, asks around, judges, and tells everybody the same cause.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::tcp::links::timespec;
use crate::verdict::{Cause, Question, Status, judge};

use super::bureau::{Bureau, PROBE_PATIENCE};
use super::leaf::drain;
use super::wire::{Message, Wire};

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
    deadline: Instant,
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
            self.tell_all(&Message::Goodbye);
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
        let next = self.inquiries.iter().map(|inquiry| inquiry.deadline).min();
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
                    }
                }
                Message::Goodbye => {
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
        self.inquiries.push(Inquiry { number, asker, id, question, statuses, deadline });
        self.tell_all(&Message::Probe { inquiry: number });
    }

    /// Judges where everybody has answered, or has had the time to.
    fn settle(&mut self) {
        let now = Instant::now();
        for index in (0..self.inquiries.len()).rev() {
            let inquiry = &self.inquiries[index];
            let silent =
                |(rank, member): (usize, &Member)| inquiry.statuses[rank].is_none() && member.wire.is_some();
            if now < inquiry.deadline && self.members.iter().enumerate().any(silent) {
                continue;
            }
            let inquiry = self.inquiries.swap_remove(index);
            let statuses: Vec<Status> =
                inquiry.statuses.iter().enumerate().map(|(rank, said)| self.status(rank, said)).collect();
            let cause = judge(inquiry.asker, &inquiry.question, &statuses);
            match cause {
                Some(cause) if inquiry.question.is_fatal() => self.declare(cause),
                cause => self.answer(inquiry.asker, inquiry.id, cause),
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
        if self.bureau.fail(cause.clone()) {
            self.tell_all(&Message::Verdict(cause));
        }
    }

    fn tell_all(&mut self, message: &Message) {
        self.members
            .iter_mut()
            .filter_map(|member| member.wire.as_mut())
            .for_each(|wire| wire.write(message));
    }
}
