//! The sum of what groups send.

use candle_core::Tensor;
use comm::{Communicator, Operation, ReduceOp};

use super::FarPrecision;
use super::quantized::{BLOCK, Quantized};
use crate::Result;
use crate::parallel::FarGroups;

/// Returns the sum of the groups' tensors, the same to the bit on each, and what of this group's own it has not. Each of
/// `copies` gives the same tensor, and sends a part of it.
pub(super) fn sum_over_groups(
    groups: &FarGroups,
    own: &Tensor,
    copies: &dyn Communicator,
    precision: FarPrecision,
) -> Result<(Tensor, Option<Tensor>)> {
    let len = own.elem_count();
    // Blocks are quantized by themselves.
    let part = len.div_ceil(copies.world_size()).next_multiple_of(BLOCK);
    let whole = own.pad_with_zeros(0, 0, part * copies.world_size() - len)?;
    let begin = part * copies.rank();
    let (sum, error) = match precision.bits() {
        None => (sum_in_order(&*groups.across, &whole.narrow(0, begin, part)?)?, None),
        Some(bits) => {
            let sent = Quantized::new(&whole, bits)?;
            let error = (own - sent.values()?.narrow(0, 0, len)?)?;
            let sum = sent.blocks(begin..begin + part)?.sum_over(&*groups.across)?;
            (sum, Some(error))
        }
    };
    if copies.world_size() == 1 {
        return Ok((sum.narrow(0, 0, len)?, error));
    }
    let all = whole.zeros_like()?;
    copies.run(Operation::AllGather { output: all.clone(), input: sum, counts: None })?;
    Ok((all.narrow(0, 0, len)?, error))
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
