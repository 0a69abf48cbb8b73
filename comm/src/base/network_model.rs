//! Model of a network in which protocols are simulated: a rank sends over a link of its own into a network without limits, and
//! receives over another. Time is that of the model.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

/// A rank's link, in each direction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinkModel {
    /// From one rank to another.
    pub(crate) latency: Duration,
    pub(crate) bytes_per_second: f64,
}

impl LinkModel {
    fn occupied(&self, bytes: usize) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.bytes_per_second)
    }
}

/// Messages on their way, and when they arrive.
pub(crate) struct Network<M> {
    link: LinkModel,
    now: Duration,
    /// By rank: until when its links are occupied, outgoing and incoming.
    busy: Vec<[Duration; 2]>,
    /// By time, then in the order in which they were sent: time, number, and place in `messages`.
    arrivals: BinaryHeap<Reverse<(Duration, usize)>>,
    /// By number: to which rank, and what.
    messages: Vec<Option<(usize, M)>>,
    /// By rank: messages and bytes sent.
    sent: Vec<[usize; 2]>,
}

impl<M> Network<M> {
    pub(crate) fn new(ranks: usize, link: LinkModel) -> Self {
        let (arrivals, messages) = (BinaryHeap::new(), Vec::new());
        let (busy, sent) = (vec![[Duration::ZERO; 2]; ranks], vec![[0; 2]; ranks]);
        Self { link, now: Duration::ZERO, busy, arrivals, messages, sent }
    }

    /// Time since the beginning.
    pub(crate) fn now(&self) -> Duration {
        self.now
    }

    /// Sends a message: it waits until the sender's link is free, then for the latency, then until it has come in over the receiver's
    /// link.
    pub(crate) fn send(&mut self, from: usize, to: usize, bytes: usize, message: M) {
        let time = self.link.occupied(bytes);
        let left = self.busy[from][0].max(self.now) + time;
        self.busy[from][0] = left;
        let arrived = (left + self.link.latency).max(self.busy[to][1] + time);
        self.busy[to][1] = arrived;
        self.sent[from][0] += 1;
        self.sent[from][1] += bytes;
        self.at(arrived, to, message);
    }

    /// Lets something happen at a rank, at a time.
    pub(crate) fn at(&mut self, time: Duration, to: usize, message: M) {
        self.arrivals.push(Reverse((time, self.messages.len())));
        self.messages.push(Some((to, message)));
    }

    /// Returns what happens next: the rank, and the message that arrives there. Goes on to its time.
    pub(crate) fn next(&mut self) -> Option<(usize, M)> {
        let Reverse((time, number)) = self.arrivals.pop()?;
        self.now = time;
        self.messages[number].take()
    }

    /// Returns how many messages and bytes a rank has sent.
    pub(crate) fn sent_by(&self, rank: usize) -> [usize; 2] {
        self.sent[rank]
    }

    /// Returns how many messages and bytes all ranks have sent.
    pub(crate) fn sent(&self) -> [usize; 2] {
        self.sent.iter().fold([0; 2], |sum, sent| [sum[0] + sent[0], sum[1] + sent[1]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_wait_for_links_and_take_their_time() {
        let link = LinkModel { latency: Duration::from_millis(10), bytes_per_second: 1000.0 };
        let mut network = Network::new(3, link);
        // The second waits for the sender's link, the third for the receiver's.
        network.send(0, 2, 100, "first");
        network.send(0, 1, 100, "second");
        network.send(1, 2, 50, "third");
        network.at(Duration::from_millis(115), 0, "a timer");
        let mut seen = Vec::new();
        while let Some((to, message)) = network.next() {
            seen.push((network.now().as_millis(), to, message));
        }
        let expected = [(110, 2, "first"), (115, 0, "a timer"), (160, 2, "third"), (210, 1, "second")];
        assert_eq!(seen, expected);
        assert_eq!((network.sent(), network.sent_by(0)), ([3, 250], [2, 200]));
    }
}
