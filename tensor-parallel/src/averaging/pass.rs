//! State of one backward pass: which gradients are sent together, and which are still expected.

use std::collections::{BTreeMap, HashMap, HashSet};

use candle_core::{DType, Tensor, Var};
use strategy::BucketAverage;

/// Bytes of gradients that are sent together; the size of PyTorch's first bucket.
pub(super) const BUCKET_BYTES: usize = 1 << 20;

/// A parameter whose layers deliver its gradient directly.
///
/// In one graph its gradient is complete once. But what backward recomputes has a separate graph: a parameter that is used
/// there and elsewhere gets several gradients in one backward, which are summed.
#[derive(Debug)]
pub(super) struct DirectGradient {
    bytes: usize,
    dtype: DType,
    /// Whether layers have used it in recomputed parts.
    in_parts: bool,
    /// How many gradients of it arrive in a backward; `None` while that is unknown.
    times: Option<usize>,
}

impl DirectGradient {
    pub(super) fn new(var: &Var) -> Self {
        let dtype = var.dtype();
        Self { bytes: var.elem_count() * dtype.size_in_bytes(), dtype, in_parts: false, times: Some(1) }
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Records that a layer has used it in a recomputed part.
    pub(super) fn is_in_part(&mut self) {
        if !std::mem::replace(&mut self.in_parts, true) {
            self.times = None;
        }
    }

    /// Records how many gradients of it arrived in a backward that has ended.
    pub(super) fn record_arrivals(&mut self, times: usize) {
        if times > 0 {
            self.times = Some(self.times.unwrap_or(0).max(times));
        }
    }
}

/// State of one backward.
#[derive(Debug)]
pub(super) struct Pass {
    /// Indices of the parameters that are sent together: the same on all replicas, whatever each of them computes.
    pub(super) buckets: Vec<Vec<usize>>,
    /// Number of buckets sent.
    pub(super) sent: usize,
    /// How many gradients of a parameter are expected; `None`: unknown, and its bucket is sent at the end.
    awaited: HashMap<usize, Option<usize>>,
    /// How many have arrived.
    pub(super) come: HashMap<usize, usize>,
    /// Sums of the gradients that have not been sent yet.
    pub(super) waiting: HashMap<usize, Tensor>,
    /// Sums of those that arrived after their bucket had been sent: more than expected.
    pub(super) late: HashMap<usize, Tensor>,
    /// Parameters of which this replica has a gradient.
    pub(super) present: HashSet<usize>,
    /// Averages the buckets sent.
    pub(super) average: BucketAverage,
    /// Gradients that are being averaged.
    pub(super) in_flight: Vec<(usize, Tensor)>,
}

impl Pass {
    /// `given` is keyed by parameter index, in the order of the model.
    pub(super) fn new(given: &BTreeMap<usize, DirectGradient>, average: BucketAverage) -> Self {
        let (mut buckets, mut bytes) = (vec![Vec::new()], 0);
        // Backward reaches the last ones first.
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
        let (sent, come, waiting, late, present, in_flight) = Default::default();
        Self { buckets, sent, awaited, come, waiting, late, present, average, in_flight }
    }

    /// Receives a gradient of a parameter.
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

    /// Sends the next buckets, as far as they are complete.
    pub(super) fn send_complete(&mut self) -> comm::Result<()> {
        while let Some(bucket) = self.buckets.get(self.sent)
            && bucket.iter().all(|index| self.is_complete(*index))
        {
            let own = bucket.iter().filter_map(|&index| Some((index, self.waiting.remove(&index)?)));
            let gradients = own.collect();
            self.sent += 1;
            self.send(gradients)?;
        }
        Ok(())
    }

    /// Starts to average gradients, together.
    pub(super) fn send(&mut self, gradients: Vec<(usize, Tensor)>) -> comm::Result<()> {
        gradients.iter().try_for_each(|(_, gradient)| self.average.add(gradient))?;
        self.in_flight.extend(gradients);
        self.average.flush()
    }

    fn is_complete(&self, index: usize) -> bool {
        let come = self.come.get(&index).copied().unwrap_or(0);
        let awaited = self.awaited.get(&index).copied().flatten();
        self.waiting.contains_key(&index) && awaited.is_some_and(|awaited| come >= awaited)
    }
}
