//! Point-to-point messages, several at a time.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::algorithm::schedule::Combine;
use crate::base::fingerprint::{self, Fingerprint};
use crate::engine::memory::Memory;
use crate::transport::links::Links;
use crate::{ReduceOp, Result};

use super::{Peer, Receiving, ScheduleExecutor, Sending};

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
    pub(crate) fn exchange(&mut self, parcels: Vec<MessageTransfer>, memory: &mut Memory<'_>) -> Result<()> {
        let Some(first) = parcels.first().map(|parcel| parcel.fingerprint) else { return Ok(()) };
        let mut lanes = self.lanes(parcels, first);
        self.open()?;
        self.timeouts.reset();
        loop {
            let began = self.begin_next(&mut lanes);
            if lanes.is_empty() {
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
    pub(super) fn lanes(&mut self, parcels: Vec<MessageTransfer>, first: Fingerprint) -> Vec<MessageQueue> {
        self.timeouts.begin(self.links.spins());
        self.waiting_since = None;
        self.sends.clear();
        self.receives.clear();
        self.call.peers.clear();
        self.call.op = ReduceOp::Sum;
        self.call.fingerprint = first;
        let mut lanes: Vec<MessageQueue> = Vec::new();
        for parcel in parcels {
            let (peer, outgoing) = (parcel.peer, parcel.outgoing);
            if !self.call.peers.iter().any(|known| known.rank == peer) {
                self.call.peers.push(Peer::silent(peer, parcel.fingerprint));
            }
            match lanes.iter_mut().find(|lane| lane.peer == peer && lane.outgoing == outgoing) {
                Some(lane) => lane.waiting.push_back(parcel),
                None => lanes.push(MessageQueue { peer, outgoing, waiting: [parcel].into(), busy: false }),
            }
        }
        lanes
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
        let Some(peer) = self.call.peers.iter().find(|peer| peer.rank == to) else { return false };
        let left = self.sends.iter().any(|send| send.to == to && send.at < send.end);
        peer.told > 0
            && (peer.told < fingerprint::LEN || left)
            && !self.links.has_separate_control_channel(to)
    }

    /// Removes finished messages and begins the next one of each queue. Returns whether one was begun.
    pub(super) fn begin_next(&mut self, lanes: &mut Vec<MessageQueue>) -> bool {
        let mut began = false;
        for lane in lanes.iter_mut() {
            if lane.busy && self.is_done(lane) {
                lane.busy = false;
                lane.waiting.pop_front();
                self.sends.retain(|send| !lane.outgoing || send.to != lane.peer);
                self.receives.retain(|receive| lane.outgoing || receive.from != lane.peer);
            }
            let peer = self.call.peers.iter_mut().find(|peer| peer.rank == lane.peer);
            if let (false, Some(parcel), Some(peer)) = (lane.busy, lane.waiting.front(), peer) {
                (lane.busy, began) = (true, true);
                let range = parcel.range.clone();
                if lane.outgoing {
                    (peer.mine, peer.told) = (parcel.fingerprint.encode(), 0);
                    self.sends.push(Sending { to: lane.peer, at: range.start, end: range.end });
                } else {
                    (peer.fingerprint, peer.heard) = (parcel.fingerprint, 0);
                    self.receives.push(Receiving::new(lane.peer, range, 0, Combine::Replace));
                }
            }
        }
        lanes.retain(|lane| lane.busy);
        if let Some(parcel) = lanes.first().and_then(|lane| lane.waiting.front()) {
            self.call.fingerprint = parcel.fingerprint;
        }
        began
    }

    fn is_done(&self, lane: &MessageQueue) -> bool {
        let Some(peer) = self.call.peers.iter().find(|peer| peer.rank == lane.peer) else { return true };
        if lane.outgoing {
            let send = self.sends.iter().find(|send| send.to == lane.peer);
            peer.told == fingerprint::LEN && send.is_none_or(|send| send.at == send.end)
        } else {
            let receive = self.receives.iter().find(|receive| receive.from == lane.peer);
            peer.heard == fingerprint::LEN && receive.is_none_or(|receive| receive.got == receive.len)
        }
    }
}

impl Peer {
    /// Creates a peer with no announcement pending in either direction.
    fn silent(rank: usize, fingerprint: Fingerprint) -> Self {
        let (told, heard) = (fingerprint::LEN, fingerprint::LEN);
        let (mine, announcement) = (fingerprint.encode(), [0; fingerprint::LEN]);
        Self { rank, fingerprint, mine, told, announcement, heard }
    }
}
