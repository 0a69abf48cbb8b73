//! Memory accounting: live and peak bytes.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of one kind of memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Currently allocated.
    pub live: usize,
    /// Maximum so far.
    pub peak: usize,
}

/// What a [`crate::Fsdp`] holds on this rank. Optimizer state and activations are not included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// This rank's shards, and units that are gathered or being gathered.
    pub parameters: Bytes,
    /// Gradients of units until they are averaged, and gradients of shards until the next backward.
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
