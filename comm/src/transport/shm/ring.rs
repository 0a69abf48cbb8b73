//! Ring buffer in shared memory: a stream of bytes with one writer and one reader, neither of which blocks.
//!
//! Positions count the bytes of the whole stream. Each end keeps its own position privately, publishes it, and checks the
//! position that the other end publishes: whatever value is there, no access is outside the ring.
//!
//! An end that wants to sleep sets its flag (`expect_*`), checks once more, then sleeps; an end that has moved bytes
//! checks the other's flag, and signals its wake-up. Both have a fence between their two steps, so that at least one of them
//! sees the other.
//!
//! `tests/ring_model` compiles this file with the atomics of a model checker, which tries all orders that the memory
//! model allows.

use std::sync::Arc;

use crate::transport::links::Closed;

use super::region::{AtomicU32, CAPACITY, Ordering, Region, fence};
use super::wake_up::WakeUp;

/// Most bytes written before they are published: the reader can work on these while the writer continues.
const MAX_WRITE: usize = 64 * 1024;
/// Free bytes from which on a full ring counts as having room: a sleeping writer is not woken for every few bytes.
const MIN_FREE: usize = CAPACITY / 4;
/// The reader publishes its position each time it has read this many bytes: for a small message that takes as long as reading.
/// A writer that waits for room is always told, since `MIN_FREE` and this are together less than the ring.
const MAX_UNPUBLISHED: u64 = CAPACITY as u64 / 16;
/// A message's body is split at multiples of this many bytes only: never within an element.
const SPLIT_ALIGNMENT: usize = 16;

/// The writing end.
#[derive(Debug)]
pub(crate) struct Writer {
    region: Region,
    head: u64,
    /// The reader's position when last loaded.
    tail: u64,
    reader: Arc<WakeUp>,
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct Reader {
    region: Region,
    tail: u64,
    /// The position that the writer sees: less than [`MAX_UNPUBLISHED`] bytes behind `tail`.
    published: u64,
    /// The writer's position when last loaded.
    head: u64,
    /// Bytes that `peek` returned and the caller did not consume, because they were too few to use.
    left: usize,
    writer: Arc<WakeUp>,
}

impl Writer {
    /// `reader`: the wake-up that wakes the process at the other end.
    pub(super) fn new(region: Region, reader: Arc<WakeUp>) -> Self {
        Self { region, head: 0, tail: 0, reader }
    }

    /// Writes some of `head`, then of `body`. Returns the number of bytes, 0 where there is no room now.
    pub(crate) fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        let len = head.len() + body.len();
        if len > self.room()? && !self.has_room()? && len > self.room()? {
            return Ok(0);
        }
        let limit = self.room()?.min(MAX_WRITE);
        let of_head = head.len().min(limit);
        let mut of_body = body.len().min(limit - of_head);
        if of_body < body.len() {
            of_body -= of_body % SPLIT_ALIGNMENT;
        }
        self.region.write(self.head, &head[..of_head]);
        self.region.write(self.head + of_head as u64, &body[..of_body]);
        self.head += (of_head + of_body) as u64;
        let shared = self.region.header();
        shared.head.0.store(self.head, Ordering::Release);
        wake(&shared.reader_waits.0, &self.reader);
        Ok(of_head + of_body)
    }

    /// Loads the reader's position and returns whether there is room: at least `MIN_FREE` bytes.
    pub(crate) fn has_room(&mut self) -> Result<bool, Closed> {
        self.tail = self.region.header().tail.0.load(Ordering::Acquire);
        Ok(self.room()? >= MIN_FREE)
    }

    /// Returns the free bytes, going by the reader's position when last loaded.
    fn room(&self) -> Result<usize, Closed> {
        filled(self.head, self.tail).map(|filled| CAPACITY - filled)
    }

    /// Sets whether the reader signals this end's wake-up when there is room.
    pub(crate) fn expect_room(&self, expect: bool) {
        set_wait_flag(&self.region.header().writer_waits.0, expect);
    }
}

impl Reader {
    /// `writer`: the wake-up that wakes the process at the other end.
    pub(super) fn new(region: Region, writer: Arc<WakeUp>) -> Self {
        Self { region, tail: 0, published: 0, head: 0, left: 0, writer }
    }

    /// Returns bytes that have arrived and are not consumed yet, at most `MAX_WRITE` of them.
    pub(crate) fn peek(&mut self) -> Result<&[u8], Closed> {
        self.load_head()?;
        self.left = filled(self.head, self.tail)?.min(MAX_WRITE);
        Ok(self.region.bytes(self.tail, self.left))
    }

    /// Frees the first `len` bytes that [`Reader::peek`] has returned.
    pub(crate) fn consume(&mut self, len: usize) {
        let len = len.min(self.left);
        self.left -= len;
        self.tail += len as u64;
        if self.tail - self.published < MAX_UNPUBLISHED {
            return;
        }
        self.published = self.tail;
        let shared = self.region.header();
        shared.tail.0.store(self.tail, Ordering::Release);
        if CAPACITY - filled(self.head, self.tail).unwrap_or(0) >= MIN_FREE {
            wake(&shared.writer_waits.0, &self.writer);
        }
    }

    /// Copies out as many bytes as fit into `into`, and frees them.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> Result<usize, Closed> {
        let bytes = self.peek()?;
        let len = bytes.len().min(into.len());
        into[..len].copy_from_slice(&bytes[..len]);
        if len > 0 {
            self.consume(len);
        }
        self.left = 0;
        Ok(len)
    }

    /// Returns true if more bytes have arrived than the caller has already seen and left.
    pub(crate) fn has_new_bytes(&mut self) -> Result<bool, Closed> {
        self.load_head()?;
        Ok(filled(self.head, self.tail)? > self.left)
    }

    fn load_head(&mut self) -> Result<(), Closed> {
        self.head = self.region.header().head.0.load(Ordering::Acquire);
        filled(self.head, self.tail).map(drop)
    }

    /// Sets whether the writer signals this end's wake-up when bytes arrive.
    pub(crate) fn expect_bytes(&self, expect: bool) {
        set_wait_flag(&self.region.header().reader_waits.0, expect);
    }
}

/// Returns the number of bytes between two positions. An impossible position counts as the end of the stream.
fn filled(head: u64, tail: u64) -> Result<usize, Closed> {
    match usize::try_from(head.wrapping_sub(tail)) {
        Ok(filled) if filled <= CAPACITY => Ok(filled),
        _ => Err(Closed),
    }
}

/// Sets or clears the flag of an end that is about to sleep. A swap, as in [`wake`], so that all changes of the flag
/// have one order.
fn set_wait_flag(waits: &AtomicU32, expect: bool) {
    waits.swap(expect.into(), Ordering::Relaxed);
}

/// The fence between setting the flag and checking once more.
pub(crate) fn fence_before_recheck() {
    fence(Ordering::SeqCst);
}

/// Signals the wake-up of an end that sleeps until what was just published; at most once each time that end sets its flag.
fn wake(waits: &AtomicU32, wake_up: &WakeUp) {
    fence(Ordering::SeqCst);
    if waits.load(Ordering::Relaxed) != 0 && waits.swap(0, Ordering::Relaxed) != 0 {
        wake_up.signal();
    }
}
