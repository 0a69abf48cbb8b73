//! The sum of what groups send.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use super::FarPrecision;
use super::quantized::{BLOCK, Quantized};
use crate::parallel::sum;
use crate::{Error, Result};

/// What a rank sends of its group's changes, and to whom: the ranks of a group with the same parameters send a part each.
#[derive(Debug, Clone)]
pub(super) struct Exchange {
    /// The ranks with the same place in each group.
    pub(super) across: Arc<dyn Communicator>,
    pub(super) precision: FarPrecision,
    /// This rank among those of its group with the same parameters, and their number.
    pub(super) copy: (usize, usize),
}

/// The sum over all groups of the part that a rank has sent, and what it has not sent of the whole.
#[derive(Debug)]
pub(super) struct PartSum {
    sum: Tensor,
    error: Option<Tensor>,
    whole: usize,
}

/// The sum of the changes of a bucket over all groups, and what this rank's numbers have lost in it, if it was not sent exactly.
pub(super) type BucketSum = (Tensor, Option<Tensor>);

impl Exchange {
    /// This group's part of the targets of all groups; `None` if there are none.
    pub(super) fn share(&self, targets: u64) -> Result<Option<f64>> {
        let total = sum(&*self.across, targets as f64)?;
        Ok((total > 0.0).then(|| targets as f64 / total))
    }

    /// Returns the sum of the groups' tensors, the same to the bit on each, of the part that this rank sends of its own.
    pub(super) fn sum(&self, own: &Tensor) -> Result<PartSum> {
        let (whole, (copy, copies)) = (own.elem_count(), self.copy);
        // Blocks are quantized by themselves.
        let part = whole.div_ceil(copies).next_multiple_of(BLOCK);
        let padded = own.pad_with_zeros(0, 0, part * copies - whole)?;
        let begin = part * copy;
        let Some(bits) = self.precision.bits() else {
            let sum = sum_in_order(&*self.across, &padded.narrow(0, begin, part)?)?;
            return Ok(PartSum { sum, error: None, whole });
        };
        let sent = Quantized::new(&padded, bits)?;
        let error = (own - sent.values()?.narrow(0, 0, whole)?)?;
        let sum = sent.blocks(begin..begin + part)?.sum_over(&*self.across)?;
        Ok(PartSum { sum, error: Some(error), whole })
    }
}

impl PartSum {
    /// The whole sum, on a device. Each of `copies` calls this.
    pub(super) fn gather(self, copies: &dyn Communicator, device: &Device) -> Result<BucketSum> {
        let Self { sum, error, whole } = self;
        let (sum, error) = (sum.to_device(device)?, error.map(|error| error.to_device(device)).transpose()?);
        if copies.world_size() == 1 {
            return Ok((sum.narrow(0, 0, whole)?, error));
        }
        let all = Tensor::zeros(sum.elem_count() * copies.world_size(), sum.dtype(), device)?;
        copies.run(Operation::AllGather { output: all.clone(), input: sum, counts: None })?;
        Ok((all.narrow(0, 0, whole)?, error))
    }
}

/// Buckets, and the sums of them.
pub(super) type PartSums = Vec<(Range<usize>, PartSum)>;

/// Sums of buckets that are on their way while the group goes on.
#[derive(Debug)]
pub(super) struct InFlight(JoinHandle<Result<PartSums>>);

impl InFlight {
    /// Begins to exchange, in a thread.
    pub(super) fn begin(exchange: impl FnOnce() -> Result<PartSums> + Send + 'static) -> Result<Self> {
        let thread = Builder::new().name("far average".into()).spawn(exchange);
        Ok(Self(
            thread.map_err(|error| Error::invalid("a thread for an average", "none", error.to_string()))?,
        ))
    }

    /// Waits for all that is sent by the groups.
    pub(super) fn wait(self) -> Result<PartSums> {
        self.0.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Returns the sum of all ranks' tensors, each element added in the order of the ranks, wherever in the tensor it is: what some
/// ranks of a group hold twice, perhaps beside other parameters, stays the same to the bit. As many bytes as by a ring.
fn sum_in_order(across: &dyn Communicator, own: &Tensor) -> Result<Tensor> {
    let (ranks, len) = (across.world_size(), own.elem_count());
    // Two numbers have one sum.
    if ranks <= 2 {
        let sum = own.copy()?;
        across.run(Operation::AllReduce { tensor: sum.clone(), op: ReduceOp::Sum })?;
        return Ok(sum);
    }
    let part = len.div_ceil(ranks);
    let input = own.pad_with_zeros(0, 0, part * ranks - len)?.contiguous()?;
    let output = input.zeros_like()?;
    across.run(Operation::AllToAll {
        output: output.clone(),
        input,
        output_counts: None,
        input_counts: None,
    })?;
    let mut sum = output.narrow(0, 0, part)?;
    for rank in 1..ranks {
        sum = (sum + output.narrow(0, rank * part, part)?)?;
    }
    across.run(Operation::AllGather { output: output.clone(), input: sum, counts: None })?;
    Ok(output.narrow(0, 0, len)?)
}
