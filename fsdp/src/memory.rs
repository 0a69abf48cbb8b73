//! How many bytes of what are alive.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of one kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Now.
    pub live: usize,
    /// The most so far.
    pub peak: usize,
}

/// What a [`crate::Fsdp`] holds on this rank. Optimizer state is the optimizer's, and what a model's layers compute is candle's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// This rank's shards, and units that are gathered or being gathered.
    pub parameters: Bytes,
    /// Gradients of units before they are averaged, and those of the shards until the next backward.
    pub gradients: Bytes,
}

#[derive(Debug, Default)]
pub(crate) struct Meter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

impl Meter {
    pub(crate) fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: usize) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn bytes(&self) -> Bytes {
        Bytes { live: self.live.load(Ordering::Relaxed), peak: self.peak.load(Ordering::Relaxed) }
    }
}
