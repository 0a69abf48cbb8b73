//! One backward pass: which gradients go out together, and how far they are.

use std::collections::{HashMap, HashSet};

use candle_core::Tensor;
use comm::Work;

/// Gradients of so many bytes go out together. As large as PyTorch's first bucket.
const BUCKET_BYTES: usize = 1 << 20;

/// One backward.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// Which parameters go out together: the same on all copies, whatever each of them computes.
    pub(super) buckets: Vec<Vec<usize>>,
    /// Buckets that were sent.
    pub(super) sent: usize,
    /// Complete and not sent yet.
    pub(super) waiting: HashMap<usize, Tensor>,
    /// Whose gradients this copy has.
    pub(super) present: HashSet<usize>,
    pub(super) flights: Vec<Flight>,
}

impl Pass {
    pub(super) fn new(given: &[(usize, usize)]) -> Self {
        let (mut buckets, mut bytes) = (vec![Vec::new()], 0);
        // Backward comes to the last ones first.
        for (index, size) in given.iter().rev() {
            if bytes >= BUCKET_BYTES {
                buckets.push(Vec::new());
                bytes = 0;
            }
            bytes += size;
            if let Some(bucket) = buckets.last_mut() {
                bucket.push(*index);
            }
        }
        buckets.retain(|bucket| !bucket.is_empty());
        Self { buckets, ..Self::default() }
    }

    /// The next bucket, where all of it is there.
    pub(super) fn next(&mut self) -> Option<Vec<(usize, Tensor)>> {
        let bucket = self.buckets.get(self.sent)?;
        if !bucket.iter().all(|index| self.waiting.contains_key(index)) {
            return None;
        }
        self.sent += 1;
        Some(bucket.iter().filter_map(|&index| Some((index, self.waiting.remove(&index)?))).collect())
    }
}

/// Gradients that are being averaged.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) gradients: Vec<(usize, Tensor)>,
    pub(super) work: Work,
}
