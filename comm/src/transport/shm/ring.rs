//! A stream of bytes through shared memory, with one writer and one reader, which never block.
//!
//! Positions count the bytes of the whole stream. Each end keeps its own position to itself, publishes it, and checks what
//! it reads of the other's: whatever stands there, nobody reads or writes outside of the ring.
//!
//! Who wants to sleep says so (`expect_*`), then looks once more, then sleeps; who has moved bytes looks whether the
//! other says so, and rings. Between the two steps of either lies a fence: at least one of them sees the other.
//!
//! `tests/ring_model` compiles this file with atomics of a model checker, which tries all that a processor may do with them.

use std::sync::Arc;

use crate::transport::links::Closed;

use super::bell::Bell;
use super::region::{AtomicU32, CAPACITY, Ordering, Region, fence};

/// Bytes that are written before the reader may see them: while it works on these, the writer goes on.
const PUBLISH: usize = 64 * 1024;
/// There is no room before so much is free: a writer that sleeps shall not be woken for every few bytes.
const ENOUGH: usize = CAPACITY / 4;
/// Where a message is cut, it is at a multiple of this many bytes: never within an element.
const GRAIN: usize = 16;

/// The writing end.
#[derive(Debug)]
pub(super) struct Writer {
    region: Region,
    head: u64,
    /// The reader's position when last looked at.
    tail: u64,
    reader: Arc<Bell>,
}

/// The reading end.
#[derive(Debug)]
pub(super) struct Reader {
    region: Region,
    tail: u64,
    /// The writer's position when last looked at.
    head: u64,
    /// Bytes that were looked at and left, because they were too few.
    left: usize,
    writer: Arc<Bell>,
}

impl Writer {
    /// `reader`: the bell of the process at the other end.
    pub(super) fn new(region: Region, reader: Arc<Bell>) -> Self {
        Self { region, head: 0, tail: 0, reader }
    }

    /// Takes some of `head`, then of `body`; how much, 0 where there is no room now.
    pub(super) fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let len = head.len() + body.len();
        if len > self.room()? && !self.has_room()? && len > self.room()? {
            return Ok(0);
        }
        let limit = self.room()?.min(PUBLISH);
        let of_head = head.len().min(limit);
        let mut of_body = body.len().min(limit - of_head);
        if of_body < body.len() {
            of_body -= of_body % GRAIN;
        }
        self.region.write(self.head, &head[..of_head]);
        self.region.write(self.head + of_head as u64, &body[..of_body]);
        self.head += (of_head + of_body) as u64;
        let shared = self.region.header();
        shared.head.0.store(self.head, Ordering::Release);
        rouse(&shared.reader_waits.0, &self.reader);
        Ok(of_head + of_body)
    }

    /// Looks whether there is room; not the little that would not be worth waking up for.
    pub(super) fn has_room(&mut self) -> Result<bool, Closed> {
        self.tail = self.region.header().tail.0.load(Ordering::Acquire);
        Ok(self.room()? >= ENOUGH)
    }

    /// Free bytes, as far as known.
    fn room(&self) -> Result<usize, Closed> {
        filled(self.head, self.tail).map(|filled| CAPACITY - filled)
    }

    /// Whether the reader shall ring when there is room.
    pub(super) fn expect_room(&self, expect: bool) {
        set(&self.region.header().writer_waits.0, expect);
    }
}

impl Reader {
    /// `writer`: the bell of the process at the other end.
    pub(super) fn new(region: Region, writer: Arc<Bell>) -> Self {
        Self { region, tail: 0, head: 0, left: 0, writer }
    }

    /// What has come and was not read yet, or the first part of it.
    pub(super) fn peek(&mut self) -> Result<&[u8], Closed> {
        self.look()?;
        self.left = filled(self.head, self.tail)?.min(PUBLISH);
        Ok(self.region.bytes(self.tail, self.left))
    }

    /// Makes room of what [`Reader::peek`] has shown: of its first `len` bytes.
    pub(super) fn consume(&mut self, len: usize) {
        let len = len.min(self.left);
        self.left -= len;
        self.tail += len as u64;
        let shared = self.region.header();
        shared.tail.0.store(self.tail, Ordering::Release);
        if CAPACITY - filled(self.head, self.tail).unwrap_or(0) >= ENOUGH {
            rouse(&shared.writer_waits.0, &self.writer);
        }
    }

    /// Copies out what fits into `into`, and makes room of it.
    pub(super) fn read(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let bytes = self.peek()?;
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        if len > 0 {
            self.consume(len);
        }
        self.left = 0;
        Ok(len)
    }

    /// True where more has come than was there, and left there, before.
    pub(super) fn has_news(&mut self) -> Result<bool, Closed> {
        self.look()?;
        Ok(filled(self.head, self.tail)? > self.left)
    }

    fn look(&mut self) -> Result<(), Closed> {
        self.head = self.region.header().head.0.load(Ordering::Acquire);
        filled(self.head, self.tail).map(drop)
    }

    /// Whether the writer shall ring when bytes come.
    pub(super) fn expect_bytes(&self, expect: bool) {
        set(&self.region.header().reader_waits.0, expect);
    }
}

/// Bytes between two positions; an end that shows a position which cannot be is as good as gone.
fn filled(head: u64, tail: u64) -> Result<usize, Closed> {
    match usize::try_from(head.wrapping_sub(tail)) {
        Ok(filled) if filled <= CAPACITY => Ok(filled),
        _ => Err(Closed),
    }
}

/// Says whether this end is about to sleep. An exchange, as [`rouse`] makes one: so there is one order of all changes.
fn set(waits: &AtomicU32, expect: bool) {
    waits.swap(expect.into(), Ordering::Relaxed);
}

/// Stands between saying that one is about to sleep and looking once more.
pub(super) fn settle() {
    fence(Ordering::SeqCst);
}

/// Rings for an end that sleeps until what was just published; a bell that two could ring is rung once.
fn rouse(waits: &AtomicU32, bell: &Bell) {
    fence(Ordering::SeqCst);
    if waits.load(Ordering::Relaxed) != 0 && waits.swap(0, Ordering::Relaxed) != 0 {
        bell.ring();
    }
}
