//! What the launcher's threads have to say, and where it waits.

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use super::nodes::message::Order;

/// What the launcher's threads have to say.
pub(super) enum Event {
    /// The process of this local rank has ended, and waits to be reaped.
    Exited(usize),
    /// This local rank has met the others, who have left these ranks of the job behind.
    Met { local_rank: usize, without: Vec<usize> },
    /// This process got a signal that is for the ranks.
    Signal(i32),
    /// Standard output cannot be written any more.
    OutputFailed(io::Error),
    /// One of the forwarding threads has forwarded all there was.
    Drained,
    /// What the job's council has decided.
    Order(Order),
}

/// What has happened, in the order of time.
pub(super) struct Inbox {
    events: Receiver<Event>,
    /// What is for later.
    kept: VecDeque<Event>,
}

impl Inbox {
    pub(super) fn new(events: Receiver<Event>) -> Self {
        Self { events, kept: VecDeque::new() }
    }

    /// The next event, or `None` at the deadline.
    pub(super) fn next(&self, deadline: Option<Instant>) -> Option<Event> {
        match deadline {
            None => self.events.recv().ok(),
            Some(deadline) => {
                self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok()
            }
        }
    }

    /// What has come already.
    pub(super) fn now(&self) -> Option<Event> {
        self.events.try_recv().ok()
    }

    /// Leaves an event to whoever looks after the ranks have ended.
    pub(super) fn keep(&mut self, event: Event) {
        self.kept.push_back(event);
    }

    /// Whether something was left so.
    pub(super) fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    pub(super) fn kept_or_next(&mut self, deadline: Option<Instant>) -> Option<Event> {
        self.kept.pop_front().or_else(|| self.next(deadline))
    }
}
