//! Schedule executor: exchanges announcements, sends, receives and reduces over the links of any transport, within a
//! time-out.

mod announcements;
mod carried;
mod exchange;
mod local;
mod opening;
mod receiving;

pub(crate) use exchange::MessageTransfer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::DType;

use crate::algorithm::schedule::{Combine, Schedule, ScheduleStep, Transfer};
use crate::base::buffer::element::{divide_bytes, unify_nans};
use crate::base::fingerprint::{self, Fingerprint};
use crate::base::last_message::LastMessage;
use crate::engine::memory::Memory;
use crate::failure::diagnosis::Question;
use crate::failure::shutdown::ShutdownFlag;
use crate::failure::supervisor::Supervisor;
use crate::failure::timeouts::Timeouts;
use crate::transport::carrier::Pump;
use crate::transport::links::{Closed, Links, Wait};
use crate::{Error, ReduceOp, Result};

use receiving::Receiving;

/// Bytes received before they are reduced: small enough to stay in the processor's cache.
const SEGMENT: usize = 128 * 1024;

/// The longest sleep of a rank with a pump: other ranks may wait for data of its earlier calls.
const MAX_SLEEP_WITH_PUMP: Duration = Duration::from_millis(1);

/// Executor of one rank; it runs one call at a time.
pub(crate) struct ScheduleExecutor<L> {
    links: L,
    supervisor: Arc<dyn Supervisor>,
    call: RunningCall,
    sends: Vec<Sending>,
    receives: Vec<Receiving>,
    /// Buffer of received bytes to be reduced, for each receive of a step; of u64 so that every element type is
    /// aligned.
    scratch: Vec<Vec<u64>>,
    waits: Vec<Wait>,
    pump: Option<Pump>,
    timeouts: Timeouts,
    /// Since when some rank that this one receives from has not announced the call. `None` if all have.
    waiting_since: Option<Instant>,
    /// Total time spent in that state, in all calls.
    pub(crate) waited: Duration,
    /// Payload bytes so far.
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
}

/// Data of the current call that does not change between steps.
struct RunningCall {
    fingerprint: Fingerprint,
    op: ReduceOp,
    dtype: DType,
    world_size: usize,
    /// In the order of their ranks.
    peers: Vec<Peer>,
}

/// State of the announcements between this rank and one peer.
struct Peer {
    rank: usize,
    /// The call, as each of the two ranks must announce it to the other.
    fingerprint: Fingerprint,
    mine: [u8; fingerprint::LEN],
    sent: usize,
    announcement: [u8; fingerprint::LEN],
    received: usize,
    /// Whether something is sent to it now, and received from it, beside the announcement.
    sending: bool,
    receiving: bool,
}

/// Returns the peer of this rank.
fn find(peers: &[Peer], rank: usize) -> Option<&Peer> {
    peers.binary_search_by_key(&rank, |peer| peer.rank).ok().map(|at| &peers[at])
}

/// Returns the peer of this rank.
fn find_mut(peers: &mut [Peer], rank: usize) -> Option<&mut Peer> {
    peers.binary_search_by_key(&rank, |peer| peer.rank).ok().map(|at| &mut peers[at])
}

struct Sending {
    to: usize,
    at: usize,
    end: usize,
}

/// The input of [`ScheduleExecutor::run`] besides the schedule.
pub(crate) struct Task<'a> {
    pub(crate) fingerprint: Fingerprint,
    /// Digests, by peer, of what a pair of ranks must agree on beyond the fingerprint. Empty if there is nothing.
    pub(crate) pairs: &'a [u64],
    pub(crate) op: ReduceOp,
    /// Type of the elements in which the schedule counts.
    pub(crate) dtype: DType,
}

impl<L: Links> ScheduleExecutor<L> {
    pub(crate) fn new(links: L, supervisor: Arc<dyn Supervisor>, world_size: usize) -> Self {
        let fingerprint = Fingerprint::new(fingerprint::CallKind::Barrier, 0);
        let (op, dtype) = (ReduceOp::Sum, DType::U8);
        let call = RunningCall { fingerprint, op, dtype, world_size, peers: Vec::new() };
        let (sends, receives, scratch, waits) = Default::default();
        let (pump, bytes_sent, bytes_received) = (None, 0, 0);
        let timeouts = Timeouts::new(Arc::default());
        Self {
            links,
            supervisor,
            call,
            sends,
            receives,
            scratch,
            waits,
            pump,
            timeouts,
            waiting_since: None,
            waited: Duration::ZERO,
            bytes_sent,
            bytes_received,
        }
    }

    /// Returns the flags with which the communicator ends the current operation.
    pub(crate) fn ending(&self) -> &Arc<ShutdownFlag> {
        self.timeouts.ending()
    }

    /// Sets the function that is called whenever this rank waits.
    pub(crate) fn pump(&mut self, pump: Option<Pump>) {
        self.pump = pump;
    }

    /// Spins, yields or sleeps until one of the links in `waits` is ready, or the wait must be re-examined.
    fn wait(&mut self) -> Result<()> {
        let longest = self.pump.as_ref().map_or(Duration::MAX, |pump| {
            pump();
            MAX_SLEEP_WITH_PUMP
        });
        let (waits, moved) = ((&self.waits[..], longest), self.bytes_sent + self.bytes_received);
        self.timeouts.wait(&mut self.links, waits, moved, &*self.supervisor, &self.call.fingerprint)
    }

    /// Checks, without waiting, whether it is still worth waiting for `peer`.
    fn consider(&mut self, peer: usize) -> Result<()> {
        let moved = self.bytes_sent + self.bytes_received;
        let considered =
            self.timeouts.check_timeouts(&self.links, peer, moved, &*self.supervisor, &self.call.fingerprint);
        considered.map(drop)
    }

    /// Runs this rank's part of a call on `memory`.
    pub(crate) fn run(
        &mut self,
        task: &Task<'_>,
        schedule: &Schedule,
        memory: &mut Memory<'_>,
    ) -> Result<()> {
        self.set_up_announcements(task, schedule);
        self.open()?;
        let size = task.dtype.size_in_bytes();
        for (index, step) in schedule.steps.iter().enumerate() {
            self.prepare(step, index == 0, memory)?;
            self.transfer(memory)?;
            self.reduce_deferred(memory)?;
            let finished = step.finished.start * size..step.finished.end * size;
            if !finished.is_empty()
                && step.is_exchange()
                && matches!(task.op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product)
            {
                memory.write_all(finished.clone(), |_, bytes| unify_nans(task.dtype, bytes))?;
            }
            if task.op == ReduceOp::Avg {
                let by = self.call.world_size;
                memory.write_all(finished, |_, bytes| divide_bytes(task.dtype, by, bytes))?;
            }
        }
        // Ranks to which this one only sent data have announced their calls, too: these announcements must be read.
        self.sends.clear();
        self.receives.clear();
        let unheard = self.call.peers.iter().filter(|peer| peer.received < fingerprint::LEN);
        self.receives.extend(unheard.map(|peer| Receiving::new(peer.rank, 0..0, 0, Combine::Replace)));
        self.transfer(memory)
    }

    fn prepare(&mut self, step: &ScheduleStep, first: bool, memory: &mut Memory<'_>) -> Result<()> {
        self.sends.clear();
        self.receives.clear();
        let size = self.call.dtype.size_in_bytes();
        for transfer in &step.transfers {
            let (from, range, mine, combine) = match transfer {
                Transfer::Send { to, range } => {
                    self.sends.push(Sending { to: *to, at: range.start * size, end: range.end * size });
                    continue;
                }
                Transfer::Copy { range, to } => {
                    memory.copy(range.start * size..range.end * size, to * size)?;
                    continue;
                }
                Transfer::Reduce { places, range } => {
                    local::reduce(memory, self.call.dtype, self.call.op, places, range.clone())?;
                    continue;
                }
                Transfer::Recv { from, range, combine } => (from, range, range.start, combine),
                Transfer::Fold { from, range, mine, combine } => (from, range, *mine, combine),
            };
            let bytes = range.start * size..range.end * size;
            let mut receive = Receiving::new(*from, bytes, mine * size, *combine);
            receive.deferred = *combine != Combine::Replace && step.overlaps(range);
            self.receives.push(receive);
        }
        if first {
            // Announce the call at once to peers that are sent no data in this step.
            for send in &self.sends {
                find_mut(&mut self.call.peers, send.to).into_iter().for_each(|peer| peer.sending = true);
            }
            let silent = self.call.peers.iter().filter(|peer| peer.sent == 0 && !peer.sending);
            self.sends.extend(silent.map(|peer| Sending { to: peer.rank, at: 0, end: 0 }));
        }
        Ok(())
    }

    /// Transfers bytes until all sends and receives of the step are done.
    fn transfer(&mut self, memory: &mut Memory<'_>) -> Result<()> {
        self.timeouts.reset();
        loop {
            self.waits.clear();
            let moved = self.send_some(memory)? | self.receive_some(memory)?;
            if self.waits.is_empty() {
                return Ok(());
            }
            if moved {
                self.timeouts.reset();
            } else {
                self.wait()?;
            }
        }
    }

    fn send_some(&mut self, memory: &Memory<'_>) -> Result<bool> {
        let mut moved = false;
        for send in &mut self.sends {
            let Some(peer) = find_mut(&mut self.call.peers, send.to) else { continue };
            let head = &peer.mine[peer.sent..];
            if head.is_empty() && send.at == send.end {
                continue;
            }
            let links = &mut self.links;
            let result = memory.read(send.at..send.end, |bytes| links.try_send(send.to, head, bytes))?;
            let Ok(sent) = result else {
                let to = send.to;
                return Err(self.stream_ended(to));
            };
            let of_head = sent.min(head.len());
            peer.sent += of_head;
            send.at += sent - of_head;
            self.bytes_sent += (sent - of_head) as u64;
            moved |= sent > 0;
            if peer.sent < fingerprint::LEN || send.at < send.end {
                self.waits.push(Wait { peer: send.to, read: false, write: true });
            }
        }
        Ok(moved)
    }

    fn receive_some(&mut self, memory: &mut Memory<'_>) -> Result<bool> {
        let (mut moved, mut unheard) = (false, false);
        for index in 0..self.receives.len() {
            let from = self.receives[index].from;
            let received = self.read_announcement(from)?;
            unheard |= received.is_none();
            // Also before an empty message, of which nothing else comes.
            moved |= received == Some(true);
            if received.is_none() || self.receives[index].got < self.receives[index].len {
                let got = if received.is_some() { self.receive(index, memory)? } else { 0 };
                moved |= got > 0;
                if received.is_none() || self.receives[index].got < self.receives[index].len {
                    self.waits.push(Wait { peer: from, read: true, write: false });
                }
            }
        }
        match (unheard, self.waiting_since) {
            (true, None) => self.waiting_since = Some(Instant::now()),
            (false, Some(since)) => {
                self.waited += since.elapsed();
                self.waiting_since = None;
            }
            (true, Some(_)) | (false, None) => {}
        }
        Ok(moved)
    }

    /// Reads some bytes of one receive. Bytes to be reduced go through the scratch buffer, unless the transport lets
    /// them be reduced where they are.
    fn receive(&mut self, index: usize, memory: &mut Memory<'_>) -> Result<usize> {
        let (receive, links) = (&mut self.receives[index], &mut self.links);
        let result = if receive.combine == Combine::Replace {
            let rest = receive.first + receive.got..receive.first + receive.len;
            memory.write(rest, |bytes| links.try_recv(receive.from, bytes))?
        } else if receive.is_in_place()
            && let Some(bytes) = links.peek(receive.from)
        {
            let bytes = bytes.ok();
            let reduced =
                bytes.map(|bytes| receive.reduce_in_place(&self.call, bytes, memory)).transpose()?;
            links.consume(receive.from, reduced.unwrap_or(0));
            reduced.ok_or(Closed)
        } else {
            let room = if receive.deferred { receive.len } else { receive.len.min(SEGMENT) };
            if self.scratch.len() <= index {
                self.scratch.resize_with(index + 1, Vec::new);
            }
            let scratch = &mut self.scratch[index];
            if scratch.len() * size_of::<u64>() < room {
                scratch.resize(room.div_ceil(size_of::<u64>()), 0);
            }
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
            let waiting = receive.got - receive.reduced;
            let end = room.min(waiting + receive.len - receive.got);
            links.try_recv(receive.from, &mut bytes[waiting..end])
        };
        let Ok(got) = result else {
            let from = receive.from;
            return Err(self.stream_ended(from));
        };
        receive.got += got;
        self.bytes_received += got as u64;
        if receive.combine != Combine::Replace && !receive.deferred && receive.reduced < receive.got {
            receive.reduce(&self.call, &mut self.scratch[index], memory)?;
        }
        Ok(got)
    }

    fn reduce_deferred(&mut self, memory: &mut Memory<'_>) -> Result<()> {
        for (index, receive) in self.receives.iter_mut().enumerate() {
            if receive.deferred && receive.len > 0 {
                receive.reduce(&self.call, &mut self.scratch[index], memory)?;
            }
        }
        Ok(())
    }

    /// Returns the error after the stream to `peer` has ended. The peer may have sent a failure report before.
    fn stream_ended(&mut self, peer: usize) -> Error {
        let (mut said, mut received) = ([0; fingerprint::LEN], 0);
        if !self.links.has_separate_control_channel(peer)
            && let Some(known) = find(&self.call.peers, peer)
            && known.received < fingerprint::LEN
        {
            (said, received) = (known.announcement, known.received);
        }
        while received < fingerprint::LEN {
            match self.links.try_recv_last_message(peer, &mut said[received..]) {
                Ok(0) | Err(Closed) => break,
                Ok(got) => received += got,
            }
        }
        self.failed(Question::lost(peer, LastMessage::decode(&said)))
    }

    fn failed(&self, question: Question) -> Error {
        crate::failure::timeouts::failure_error(&*self.supervisor, question, &self.call.fingerprint)
    }
}

#[cfg(test)]
mod tests;
