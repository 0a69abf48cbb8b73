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

/// Sent in place of an announcement by a rank that closes its group: nothing will come after it.
pub(crate) const FAREWELL: [u8; fingerprint::LEN] = *b"GRF1: this rank leaves the group";

/// Bytes that are received before they are reduced: small enough to stay in the processor's cache.
const SEGMENT: usize = 128 * 1024;

/// One rank's executor; it runs one call at a time.
pub(crate) struct Executor<L> {
    links: L,
    supervisor: Arc<dyn Supervisor>,
    call: Call,
    sends: Vec<Sending>,
    receives: Vec<Receiving>,
    /// For each receive of a step, where bytes wait to be reduced; of u64 so that every element type is aligned.
    scratch: Vec<Vec<u64>>,
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
                return Err(self.lost(to));
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
            return Err(self.failed(Question::Lost { peer: from, left: false }));
        };
        peer.heard += got;
        if peer.heard < fingerprint::LEN {
            return Ok(None);
        }
        let mine = self.call.fingerprint;
        match Fingerprint::decode(&peer.announcement) {
            Some(theirs) if theirs == mine => Ok(Some(true)),
            Some(theirs) => Err(self.failed(Question::Mismatch { peer: from, mine, theirs })),
            None if peer.announcement == FAREWELL => {
                Err(self.failed(Question::Lost { peer: from, left: true }))
            }
            None => Err(self.failed(Question::Garbage { peer: from })),
        }
    }

    /// Takes in some bytes of one receive; those to be reduced go through the scratch.
    fn receive<T: Element>(&mut self, index: usize, data: &mut [T]) -> Result<usize> {
        let receive = &mut self.receives[index];
        let size = size_of::<T>();
        let target = &mut data[receive.first..receive.first + receive.len / size];
        let result = if receive.combine == Combine::Replace {
            self.links.try_recv(receive.from, &mut bytemuck::cast_slice_mut(target)[receive.got..])
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
            self.links.try_recv(receive.from, &mut bytes[waiting..end])
        };
        let Ok(got) = result else {
            let from = receive.from;
            return Err(self.failed(Question::Lost { peer: from, left: false }));
        };
        receive.got += got;
        self.bytes_received += got as u64;
        if receive.combine != Combine::Replace && !receive.deferred {
            receive.reduce(self.call.op, &mut self.scratch[index], target);
        }
        Ok(got)
    }

    fn reduce_deferred<T: Element>(&mut self, data: &mut [T]) {
        for (index, receive) in
            self.receives.iter_mut().enumerate().filter(|(_, receive)| receive.deferred && receive.len > 0)
        {
            let target = &mut data[receive.first..receive.first + receive.len / size_of::<T>()];
            receive.reduce(self.call.op, &mut self.scratch[index], target);
        }
    }

    /// Nothing can be sent to `peer` any more. It may have said before why.
    fn lost(&mut self, peer: usize) -> Error {
        let (mut said, mut heard) = ([0; fingerprint::LEN], 0);
        if let Some(known) = self.call.peers.iter().find(|known| known.rank == peer)
            && known.heard < fingerprint::LEN
        {
            (said, heard) = (known.announcement, known.heard);
        }
        while heard < fingerprint::LEN {
            match self.links.try_recv(peer, &mut said[heard..]) {
                Ok(0) | Err(Closed) => break,
                Ok(got) => heard += got,
            }
        }
        self.failed(Question::Lost { peer, left: said == FAREWELL })
    }

    fn failed(&self, question: Question) -> Error {
        crate::patience::blame(&*self.supervisor, question, &self.call.fingerprint)
    }
}

impl Receiving {
    fn new(from: usize, first: usize, len: usize, combine: Combine, deferred: bool) -> Self {
        Self { from, first, len, got: 0, reduced: 0, combine, deferred }
    }

    /// Reduces the whole elements that wait in the scratch, and moves the rest to its front.
    fn reduce<T: Element>(&mut self, op: ReduceOp, scratch: &mut [u64], target: &mut [T]) {
        let size = size_of::<T>();
        let waiting = self.got - self.reduced;
        let whole = waiting / size;
        let theirs: &[T] = bytemuck::cast_slice(scratch);
        let done = self.reduced / size;
        combine(op, self.combine, &mut target[done..done + whole], &theirs[..whole]);
        self.reduced += whole * size;
        if waiting > whole * size {
            bytemuck::cast_slice_mut::<u64, u8>(scratch).copy_within(whole * size..waiting, 0);
        }
    }
}
