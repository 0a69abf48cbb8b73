//! Point-to-point messages, several at a time.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::algorithm::schedule::Combine;
use crate::base::fingerprint::{self, Fingerprint};
use crate::engine::memory::Memory;
use crate::transport::links::Links;
use crate::{ReduceOp, Result};

use super::{Peer, Receiving, ScheduleExecutor, Sending, find, find_mut};

/// How long a rank whose group has failed continues to send messages that it has begun.
const LAST_SENDS: Duration = Duration::from_millis(200);

/// A message that this rank sends or receives.
#[derive(Debug)]
pub(crate) struct MessageTransfer {
    pub(crate) peer: usize,
    pub(crate) outgoing: bool,
    /// Announced by the sender only.
    pub(crate) fingerprint: Fingerprint,
    /// Byte range in the memory.
    pub(crate) range: Range<usize>,
}

/// Queue of messages in one direction between this rank and a peer.
pub(super) struct MessageQueue {
    peer: usize,
    outgoing: bool,
    waiting: VecDeque<MessageTransfer>,
    /// The first message is in transfer.
    busy: bool,
}

impl<L: Links> ScheduleExecutor<L> {
    /// Sends and receives all messages. Those in one direction between two ranks keep their order; otherwise no message
    /// waits for another, so that no order of the messages can cause a deadlock between ranks.
    pub(crate) fn exchange(&mut self, messages: Vec<MessageTransfer>, memory: &mut Memory<'_>) -> Result<()> {
        let Some(first) = messages.first().map(|message| message.fingerprint) else { return Ok(()) };
        let mut queues = self.queues(messages, first);
        self.open()?;
        self.timeouts.reset();
        loop {
            let began = self.begin_next(&mut queues);
            if queues.is_empty() {
                return Ok(());
            }
            self.waits.clear();
            let moved = self.send_some(memory)? | self.receive_some(memory)?;
            if moved || began || self.waits.is_empty() {
                self.timeouts.reset();
            } else {
                self.wait()?;
            }
        }
    }

    /// Sorts the messages into queues by peer and direction, and sets up the call.
    pub(super) fn queues(&mut self, messages: Vec<MessageTransfer>, first: Fingerprint) -> Vec<MessageQueue> {
        self.timeouts.begin(self.links.spins());
        self.waiting_since = None;
        self.sends.clear();
        self.receives.clear();
        self.call.peers.clear();
        self.call.op = ReduceOp::Sum;
        self.call.fingerprint = first;
        let peers: BTreeMap<_, _> =
            messages.iter().map(|message| (message.peer, message.fingerprint)).collect();
        self.call.peers.extend(peers.into_iter().map(|(rank, fingerprint)| Peer::silent(rank, fingerprint)));
        let mut queues: Vec<MessageQueue> = Vec::new();
        let mut places: HashMap<(usize, bool), usize> = HashMap::new();
        for message in messages {
            let (peer, outgoing) = (message.peer, message.outgoing);
            let place = *places.entry((peer, outgoing)).or_insert(queues.len());
            match queues.get_mut(place) {
                Some(queue) => queue.waiting.push_back(message),
                None => queues.push(MessageQueue { peer, outgoing, waiting: [message].into(), busy: false }),
            }
        }
        queues
    }

    /// After a failure, returns the ranks to which a failure report can be sent. A message that was begun is first sent
    /// to its end, if that takes at most [`LAST_SENDS`], so that the report is not taken for a part of it.
    pub(crate) fn finish_sends(&mut self, memory: &Memory<'_>) -> Vec<usize> {
        let until = Instant::now() + LAST_SENDS;
        let mut cut_off = Vec::new();
        for send in std::mem::take(&mut self.sends) {
            let to = send.to;
            self.sends.push(send);
            while self.is_cut_off(to) && Instant::now() < until {
                self.waits.clear();
                match self.send_some(memory) {
                    Ok(true) => {}
                    Ok(false) => {
                        self.links.wait(&self.waits, until.saturating_duration_since(Instant::now()))
                    }
                    Err(_) => break,
                }
            }
            if self.is_cut_off(to) {
                cut_off.push(to);
            }
            self.sends.clear();
        }
        (0..self.call.world_size).filter(|rank| !cut_off.contains(rank)).collect()
    }

    fn is_cut_off(&self, to: usize) -> bool {
        let Some(peer) = find(&self.call.peers, to) else { return false };
        let left = self.sends.iter().any(|send| send.to == to && send.at < send.end);
        peer.sent > 0
            && (peer.sent < fingerprint::LEN || left)
            && !self.links.has_separate_control_channel(to)
    }

    /// Removes finished messages and begins the next one of each queue. Returns whether one was begun.
    pub(super) fn begin_next(&mut self, queues: &mut Vec<MessageQueue>) -> bool {
        let mut began = false;
        let peers = &mut self.call.peers;
        // One message in each direction at a time.
        self.sends.retain(|send| {
            let Some(peer) = find_mut(peers, send.to) else { return false };
            peer.sending = peer.sent < fingerprint::LEN || send.at < send.end;
            peer.sending
        });
        self.receives.retain(|receive| {
            let Some(peer) = find_mut(peers, receive.from) else { return false };
            peer.receiving = peer.received < fingerprint::LEN || receive.got < receive.len;
            peer.receiving
        });
        for queue in queues.iter_mut() {
            let peer = find_mut(peers, queue.peer);
            let in_transfer =
                peer.as_ref().is_some_and(|peer| if queue.outgoing { peer.sending } else { peer.receiving });
            if queue.busy && !in_transfer {
                queue.busy = false;
                queue.waiting.pop_front();
            }
            if let (false, Some(message), Some(peer)) = (queue.busy, queue.waiting.front(), peer) {
                (queue.busy, began) = (true, true);
                let range = message.range.clone();
                if queue.outgoing {
                    (peer.mine, peer.sent) = (message.fingerprint.encode(), 0);
                    self.sends.push(Sending { to: queue.peer, at: range.start, end: range.end });
                } else {
                    (peer.fingerprint, peer.received) = (message.fingerprint, 0);
                    self.receives.push(Receiving::new(queue.peer, range, 0, Combine::Replace));
                }
            }
        }
        queues.retain(|queue| queue.busy);
        if let Some(message) = queues.first().and_then(|queue| queue.waiting.front()) {
            self.call.fingerprint = message.fingerprint;
        }
        began
    }
}

impl Peer {
    /// Creates a peer with no announcement pending in either direction.
    fn silent(rank: usize, fingerprint: Fingerprint) -> Self {
        let (sent, received) = (fingerprint::LEN, fingerprint::LEN);
        let (mine, announcement) = (fingerprint.encode(), [0; fingerprint::LEN]);
        Self { rank, fingerprint, mine, sent, announcement, received, sending: false, receiving: false }
    }
}
