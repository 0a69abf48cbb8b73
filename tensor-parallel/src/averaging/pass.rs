//! One backward pass: which gradients go out together, and how far they are.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::Tensor;
use comm::Work;

/// Gradients of so many bytes go out together. As large as PyTorch's first bucket.
const BUCKET_BYTES: usize = 1 << 20;

/// A parameter whose layers give its gradient themselves.
///
/// In a graph its gradient is complete once. But what backward computes again has a graph of its own: a parameter that is used there,
/// and elsewhere, gets several gradients in one backward, which are one sum.
#[derive(Debug)]
pub(super) struct Given {
    bytes: usize,
    /// Layers have used it in parts that are computed again.
    in_parts: bool,
    /// How often gradients of it come in a backward; none where that is to be seen.
    times: Option<usize>,
}

impl Given {
    pub(super) fn new(bytes: usize) -> Self {
        Self { bytes, in_parts: false, times: Some(1) }
    }

    /// A layer has used it in a part.
    pub(super) fn is_in_part(&mut self) {
        if !std::mem::replace(&mut self.in_parts, true) {
            self.times = None;
        }
    }

    /// A backward has ended in which gradients of it came so often.
    pub(super) fn came(&mut self, times: usize) {
        if times > 0 {
            self.times = Some(self.times.unwrap_or(0).max(times));
        }
    }
}

/// One backward.
#[derive(Debug, Default)]
pub(super) struct Pass {
    /// Which parameters go out together: the same on all copies, whatever each of them computes.
    pub(super) buckets: Vec<Vec<usize>>,
    /// Buckets that were sent.
    pub(super) sent: usize,
    /// How often gradients of a parameter are expected; where that is not known, its bucket stays until the end.
    awaited: HashMap<usize, Option<usize>>,
    /// How often they have come.
    pub(super) come: HashMap<usize, usize>,
    /// The sums of what was not sent yet.
    pub(super) waiting: HashMap<usize, Tensor>,
    /// Those of what came after its bucket had gone: more often than expected.
    pub(super) late: HashMap<usize, Tensor>,
    /// Whose gradients this copy has.
    pub(super) present: HashSet<usize>,
    pub(super) flights: Vec<Flight>,
}

impl Pass {
    /// `given` by number, in the order of the model.
    pub(super) fn new(given: &BTreeMap<usize, Given>) -> Self {
        let (mut buckets, mut bytes) = (vec![Vec::new()], 0);
        // Backward comes to the last ones first.
        for (index, parameter) in given.iter().rev() {
            if bytes >= BUCKET_BYTES {
                buckets.push(Vec::new());
                bytes = 0;
            }
            bytes += parameter.bytes;
            if let Some(bucket) = buckets.last_mut() {
                bucket.push(*index);
            }
        }
        buckets.retain(|bucket| !bucket.is_empty());
        let awaited = given.iter().map(|(index, parameter)| (*index, parameter.times)).collect();
        Self { buckets, awaited, ..Self::default() }
    }

    /// Takes what has come of a parameter's gradient.
    pub(super) fn receive(&mut self, index: usize, gradient: Option<Tensor>) -> candle_core::Result<()> {
        *self.come.entry(index).or_default() += 1;
        let Some(gradient) = gradient else { return Ok(()) };
        self.present.insert(index);
        let has_gone = self.buckets[..self.sent].iter().any(|bucket| bucket.contains(&index));
        let sums = if has_gone { &mut self.late } else { &mut self.waiting };
        let sum = match sums.remove(&index) {
            Some(before) => (before + gradient)?,
            None => gradient,
        };
        sums.insert(index, sum);
        Ok(())
    }

    /// The next bucket, where all of it is there.
    pub(super) fn next(&mut self) -> Option<Vec<(usize, Tensor)>> {
        let bucket = self.buckets.get(self.sent)?;
        if !bucket.iter().all(|index| self.is_complete(*index)) {
            return None;
        }
        self.sent += 1;
        Some(bucket.iter().filter_map(|&index| Some((index, self.waiting.remove(&index)?))).collect())
    }

    fn is_complete(&self, index: usize) -> bool {
        let come = self.come.get(&index).copied().unwrap_or(0);
        let awaited = self.awaited.get(&index).copied().flatten();
        self.waiting.contains_key(&index) && awaited.is_some_and(|awaited| come >= awaited)
    }
}

/// Gradients that are being averaged.
#[derive(Debug)]
pub(super) struct Flight {
    pub(super) gradients: Vec<(usize, Tensor)>,
    pub(super) work: Work,
}
