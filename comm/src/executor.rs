//! Runs a schedule over the links, whatever they are: greets, sends, receives and reduces, and never waits for ever.

use std::sync::Arc;

use crate::element::{Element, combine};
use crate::fingerprint::{self, Fingerprint};
use crate::links::{Closed, Links, Wait};
use crate::patience::Patience;
use crate::schedule::{Combine, Schedule, Step, Transfer};
use crate::supervisor::Supervisor;
use crate::verdict::Question;
use crate::{Error, ReduceOp, Result};

/// Bytes that are received before they are reduced: small enough to stay in the processor's cache.
const SEGMENT: usize = 128 * 1024;

/// One rank's executor; it runs one call at a time.
pub(crate) struct Executor<L> {
    links: L,
    supervisor: Arc<dyn Supervisor>,
    call: Call,
    sends: Vec<Sending>,
    receives: Vec<Receiving>,
    /// For each receive of a step, where bytes wait to be reduced, unless they can be reduced where they arrive.
    scratch: Vec<Vec<u8>>,
    waits: Vec<Wait>,
    /// Payload so far.
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
}

/// What is the same for all steps of a call.
struct Call {
    fingerprint: Fingerprint,
    announcement: [u8; fingerprint::LEN],
    op: ReduceOp,
    world_size: usize,
    peers: Vec<Peer>,
}

/// How far the announcements between this rank and one peer have come, in bytes.
struct Peer {
    rank: usize,
    told: usize,
    heard: usize,
    announcement: [u8; fingerprint::LEN],
}

struct Sending {
    to: usize,
    at: usize,
    end: usize,
}

struct Receiving {
    from: usize,
    /// Elements.
    first: usize,
    /// Bytes.
    len: usize,
    got: usize,
    /// Bytes of `got` that have been reduced.
    reduced: usize,
    combine: Combine,
    /// What is there must be sent first, so reduction waits for the end of the step.
    deferred: bool,
}

impl<L: Links> Executor<L> {
    pub(crate) fn new(links: L, supervisor: Arc<dyn Supervisor>, world_size: usize) -> Self {
        let fingerprint = Fingerprint::new(fingerprint::Kind::Barrier, 0);
        let announcement = fingerprint.encode();
        let call = Call { fingerprint, announcement, op: ReduceOp::Sum, world_size, peers: Vec::new() };
        let (sends, receives, scratch, waits) = Default::default();
        Self { links, supervisor, call, sends, receives, scratch, waits, bytes_sent: 0, bytes_received: 0 }
    }

    /// See [`Links::segment`].
    pub(crate) fn segment(&self) -> usize {
        self.links.segment()
    }

    /// Does this rank's part of `call` on `data`.
    pub(crate) fn run<T: Element>(
        &mut self,
        fingerprint: Fingerprint,
        schedule: &Schedule,
        op: ReduceOp,
        data: &mut [T],
    ) -> Result<()> {
        self.greet(fingerprint, schedule, op);
        for (index, step) in schedule.steps.iter().enumerate() {
            self.prepare(step, size_of::<T>(), index == 0);
            self.transfer(data)?;
            self.reduce_deferred(data);
            if self.call.op == ReduceOp::Avg {
                data[step.finished.clone()]
                    .iter_mut()
                    .for_each(|element| *element = element.divide(self.call.world_size));
            }
        }
        // Ranks that we only sent to have announced their calls, too.
        self.sends.clear();
        self.receives.clear();
        let unheard = self.call.peers.iter().filter(|peer| peer.heard < fingerprint::LEN);
        self.receives.extend(unheard.map(|peer| Receiving::new(peer.rank, 0, 0, Combine::Replace, false)));
        self.transfer(data)
    }

    /// Sets up the announcements of a call: in both directions between any two ranks that exchange anything, so that a
    /// mismatch shows on both. A message is announced by its sender only.
    fn greet(&mut self, fingerprint: Fingerprint, schedule: &Schedule, op: ReduceOp) {
        self.call.fingerprint = fingerprint;
        self.call.announcement = fingerprint.encode();
        self.call.op = op;
        self.call.peers.clear();
        let one_way = fingerprint.is_message();
        self.call.peers.extend(schedule.peers().into_iter().map(|rank| {
            let sends = schedule
                .steps
                .iter()
                .flat_map(|step| &step.transfers)
                .any(|t| matches!(t, Transfer::Send { to, .. } if *to == rank));
            let done = |done: bool| if done { fingerprint::LEN } else { 0 };
            Peer {
                rank,
                told: done(one_way && !sends),
                heard: done(one_way && sends),
                announcement: [0; fingerprint::LEN],
            }
        }));
    }

    fn prepare(&mut self, step: &Step, size: usize, first: bool) {
        self.sends.clear();
        self.receives.clear();
        for transfer in &step.transfers {
            match transfer {
                Transfer::Send { to, range } => {
                    self.sends.push(Sending { to: *to, at: range.start * size, end: range.end * size });
                }
                Transfer::Recv { from, range, combine } => {
                    let deferred = *combine != Combine::Replace && step.overlaps(range);
                    self.receives.push(Receiving::new(
                        *from,
                        range.start,
                        range.len() * size,
                        *combine,
                        deferred,
                    ));
                }
            }
        }
        if first {
            // Announce the call at once to those who get no data yet.
            for peer in self.call.peers.iter().filter(|peer| peer.told == 0) {
                if !self.sends.iter().any(|send| send.to == peer.rank) {
                    self.sends.push(Sending { to: peer.rank, at: 0, end: 0 });
                }
            }
        }
    }

    /// Moves bytes until all sends and receives of the step are done.
    fn transfer<T: Element>(&mut self, data: &mut [T]) -> Result<()> {
        let mut patience = Patience::new(self.links.spins());
        loop {
            self.waits.clear();
            let moved = self.send_some(data)? | self.receive_some(data)?;
            if self.waits.is_empty() {
                return Ok(());
            }
            if moved {
                patience.reset();
            } else {
                patience.wait(&mut self.links, &self.waits, &*self.supervisor, &self.call.fingerprint)?;
            }
        }
    }

    fn send_some<T: Element>(&mut self, data: &[T]) -> Result<bool> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let mut moved = false;
        for send in &mut self.sends {
            let Some(peer) = self.call.peers.iter_mut().find(|peer| peer.rank == send.to) else { continue };
            let head = &self.call.announcement[peer.told..];
            if head.is_empty() && send.at == send.end {
                continue;
            }
            let Ok(sent) = self.links.try_send(send.to, head, &bytes[send.at..send.end]) else {
                let to = send.to;
                return Err(self.failed(Question::Lost { peer: to }));
            };
            let of_head = sent.min(head.len());
            peer.told += of_head;
            send.at += sent - of_head;
            self.bytes_sent += (sent - of_head) as u64;
            moved |= sent > 0;
            if peer.told < fingerprint::LEN || send.at < send.end {
                self.waits.push(Wait { peer: send.to, read: false, write: true });
            }
        }
        Ok(moved)
    }

    fn receive_some<T: Element>(&mut self, data: &mut [T]) -> Result<bool> {
        let mut moved = false;
        for index in 0..self.receives.len() {
            let from = self.receives[index].from;
            let heard = self.hear(from)?;
            if heard.is_none() || self.receives[index].got < self.receives[index].len {
                let got = if heard.is_some() { self.receive(index, data)? } else { 0 };
                moved |= got > 0 || heard == Some(true);
                if heard.is_none() || self.receives[index].got < self.receives[index].len {
                    self.waits.push(Wait { peer: from, read: true, write: false });
                }
            }
        }
        Ok(moved)
    }

    /// Reads what a peer announces before its data: None while that has not come, Some(true) when it has come just now.
    fn hear(&mut self, from: usize) -> Result<Option<bool>> {
        let Some(peer) = self.call.peers.iter_mut().find(|peer| peer.rank == from) else {
            return Ok(Some(false));
        };
        if peer.heard == fingerprint::LEN {
            return Ok(Some(false));
        }
        let Ok(got) = self.links.try_recv(from, &mut peer.announcement[peer.heard..]) else {
            return Err(self.failed(Question::Lost { peer: from }));
        };
        peer.heard += got;
        if peer.heard < fingerprint::LEN {
            return Ok(None);
        }
        let mine = self.call.fingerprint;
        match Fingerprint::decode(&peer.announcement) {
            Some(theirs) if theirs == mine => Ok(Some(true)),
            Some(theirs) => Err(self.failed(Question::Mismatch { peer: from, mine, theirs })),
            None => Err(self.failed(Question::Garbage { peer: from })),
        }
    }

    /// Takes in some bytes of one receive.
    fn receive<T: Element>(&mut self, index: usize, data: &mut [T]) -> Result<usize> {
        let receive = &mut self.receives[index];
        let target = &mut data[receive.first..receive.first + receive.len / size_of::<T>()];
        let result = if receive.combine == Combine::Replace {
            self.links.try_recv(receive.from, &mut bytemuck::cast_slice_mut(target)[receive.got..])
        } else if receive.deferred {
            receive.fetch(&mut self.links, scratch(&mut self.scratch, index, receive.len))
        } else if let Some(bytes) = self.links.peek(receive.from) {
            let reduced = bytes.map(|bytes| receive.reduce(self.call.op, bytes, target));
            self.links.consume(receive.from, reduced.unwrap_or(0));
            reduced
        } else {
            let scratch = scratch(&mut self.scratch, index, receive.len.min(SEGMENT));
            let fetched = receive.fetch(&mut self.links, scratch);
            fetched.inspect(|got| receive.reduce_fetched(self.call.op, *got, scratch, target))
        };
        let Ok(got) = result else {
            let from = receive.from;
            return Err(self.failed(Question::Lost { peer: from }));
        };
        receive.got += got;
        self.bytes_received += got as u64;
        Ok(got)
    }

    fn reduce_deferred<T: Element>(&mut self, data: &mut [T]) {
        for (index, receive) in
            self.receives.iter_mut().enumerate().filter(|(_, receive)| receive.deferred && receive.len > 0)
        {
            let target = &mut data[receive.first..receive.first + receive.len / size_of::<T>()];
            receive.reduce(self.call.op, scratch(&mut self.scratch, index, receive.len), target);
        }
    }

    fn failed(&self, question: Question) -> Error {
        crate::patience::blame(&*self.supervisor, question, &self.call.fingerprint)
    }
}

impl Receiving {
    fn new(from: usize, first: usize, len: usize, combine: Combine, deferred: bool) -> Self {
        Self { from, first, len, got: 0, reduced: 0, combine, deferred }
    }

    /// Receives behind the bytes that wait in the scratch, as far as it has room.
    fn fetch(&self, links: &mut impl Links, scratch: &mut [u8]) -> std::result::Result<usize, Closed> {
        let waiting = self.got - self.reduced;
        let end = scratch.len().min(waiting + self.len - self.got);
        links.try_recv(self.from, &mut scratch[waiting..end])
    }

    /// Reduces the whole elements that wait in the scratch, of which `got` bytes are new, and moves the rest to its front.
    fn reduce_fetched<T: Element>(&mut self, op: ReduceOp, got: usize, scratch: &mut [u8], target: &mut [T]) {
        let waiting = self.got + got - self.reduced;
        let whole = self.reduce(op, &scratch[..waiting], target);
        scratch.copy_within(whole..waiting, 0);
    }

    /// Reduces the whole elements at the front of `bytes`; the bytes that they take.
    fn reduce<T: Element>(&mut self, op: ReduceOp, bytes: &[u8], target: &mut [T]) -> usize {
        let size = size_of::<T>();
        let done = self.reduced / size;
        let whole = (bytes.len() / size).min(target.len() - done);
        combine(op, self.combine, &mut target[done..done + whole], &bytes[..whole * size]);
        self.reduced += whole * size;
        whole * size
    }
}

/// The scratch of a receive, with room for `len` bytes.
fn scratch(scratch: &mut Vec<Vec<u8>>, index: usize, len: usize) -> &mut [u8] {
    if scratch.len() <= index {
        scratch.resize_with(index + 1, Vec::new);
    }
    let scratch = &mut scratch[index];
    if scratch.len() < len {
        scratch.resize(len, 0);
    }
    &mut scratch[..len]
}
