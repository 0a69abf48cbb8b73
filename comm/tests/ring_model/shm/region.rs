//! Shared memory of the ring, with atomics and bytes that the model checker watches. Memory orderings and the fence can
//! be removed, to test that the checker detects their absence.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use loom::cell::UnsafeCell;
pub(super) use loom::sync::atomic::Ordering;

/// Exactly one message, so that writer and reader have to wait for each other.
pub(super) const CAPACITY: usize = 32;
const GRAIN: usize = 16;

/// The ordering or fence to remove.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Without {
    #[default]
    Nothing,
    Acquire,
    Release,
    Fence,
}

thread_local! {
    static WITHOUT: Cell<Without> = const { Cell::new(Without::Nothing) };
}

pub(super) fn take_out(what: Without) {
    WITHOUT.set(what);
}

fn kept(order: Ordering) -> Ordering {
    match (order, WITHOUT.get()) {
        (Ordering::Acquire, Without::Acquire) | (Ordering::Release, Without::Release) => Ordering::Relaxed,
        _ => order,
    }
}

pub(super) fn fence(order: Ordering) {
    if WITHOUT.get() != Without::Fence {
        loom::sync::atomic::fence(order);
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty) => {
        #[derive(Debug, Default)]
        pub(super) struct $name(loom::sync::atomic::$name);

        impl $name {
            pub(super) fn load(&self, order: Ordering) -> $value {
                self.0.load(kept(order))
            }
        }
    };
}

atomic!(AtomicU64, u64);
atomic!(AtomicU32, u32);

impl AtomicU64 {
    pub(super) fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, kept(order));
    }
}

impl AtomicU32 {
    pub(super) fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.0.swap(value, kept(order))
    }
}

#[derive(Debug, Default)]
pub(super) struct Line<T>(pub(super) T);

#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) head: Line<AtomicU64>,
    pub(super) tail: Line<AtomicU64>,
    pub(super) reader_waits: Line<AtomicU32>,
    pub(super) writer_waits: Line<AtomicU32>,
}

#[derive(Debug)]
struct Memory {
    header: Header,
    /// Lets the checker detect concurrent access to the same grain of bytes.
    watched: [UnsafeCell<()>; CAPACITY / GRAIN],
    bytes: [AtomicU8; CAPACITY],
}

/// One end's handle of the shared memory.
#[derive(Clone, Debug)]
pub(super) struct Region(Arc<Memory>);

impl Region {
    pub(super) fn new() -> Self {
        let watched = std::array::from_fn(|_| UnsafeCell::new(()));
        let bytes = std::array::from_fn(|_| AtomicU8::new(0));
        Self(Arc::new(Memory { header: Header::default(), watched, bytes }))
    }

    pub(super) fn header(&self) -> &Header {
        &self.0.header
    }

    pub(super) fn write(&mut self, position: u64, bytes: &[u8]) {
        self.places(position, bytes.len()).for_each(|grain| self.0.watched[grain].with_mut(|_| ()));
        for (at, byte) in bytes.iter().enumerate() {
            self.0.bytes[(position as usize + at) % CAPACITY].store(*byte, Relaxed);
        }
    }

    pub(super) fn bytes(&self, position: u64, len: usize) -> &[u8] {
        self.places(position, len).for_each(|grain| self.0.watched[grain].with(|_| ()));
        let byte = |at: usize| self.0.bytes[(position as usize + at) % CAPACITY].load(Relaxed);
        // Leaks a few bytes in each run.
        (0..len).map(byte).collect::<Vec<u8>>().leak()
    }

    fn places(&self, position: u64, len: usize) -> impl Iterator<Item = usize> + use<> {
        let first = position as usize / GRAIN;
        (first..(position as usize + len).div_ceil(GRAIN)).map(|grain| grain % (CAPACITY / GRAIN))
    }
}
