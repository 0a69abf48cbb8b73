//! Events from the launcher's threads, and the queue in which the main thread waits for them.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::message::Order;

/// An event that one of the launcher's threads reports.
pub(super) enum Event {
    /// The process of this local rank has ended, and is not reaped yet. It may be one of an earlier round that was given up.
    Exited { local_rank: usize, pid: u32 },
    /// This local rank has joined the group, which excludes the ranks `without` of the job.
    Met { local_rank: usize, without: Vec<usize> },
    /// This process received a signal that ends the job.
    Signal(i32),
    /// This process received a signal that only concerns the ranks' programs.
    UserSignal(i32),
    /// Writing to standard output failed.
    OutputFailed(io::Error),
    /// One of the forwarding threads has forwarded all output.
    Drained,
    /// An order from the coordinator of the job.
    Order(Order),
}

/// Queue of events, in the order in which they happened.
pub(super) struct Inbox {
    events: Receiver<Event>,
    /// Events set aside for later.
    kept: VecDeque<Event>,
}

impl Inbox {
    pub(super) fn new(events: Receiver<Event>) -> Self {
        Self { events, kept: VecDeque::new() }
    }

    /// Waits for the next event. Returns `None` at the deadline, or when all senders are gone.
    pub(super) fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        match deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
            }
        }
    }

    /// Returns an event that has already arrived, if any.
    pub(super) fn now(&self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Sets an event aside for the code that runs after the ranks have ended.
    pub(super) fn keep(&mut self, event: Event) {
        self.kept.push_back(event);
    }

    /// Whether any event was set aside.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    pub(super) fn kept_or_next(&mut self, deadline: Option<Instant>) -> Option<Event> {
        self.kept.pop_front().or_else(|| self.next(deadline))
    }
}
