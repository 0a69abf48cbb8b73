//! State of one receive of a step: the bytes received, and their reduction.

use std::ops::Range;

use crate::Result;
use crate::algorithm::schedule::Combine;
use crate::base::buffer::element::combine_bytes;
use crate::engine::memory::Memory;

use super::RunningCall;

/// All offsets and lengths are in bytes.
pub(super) struct Receiving {
    pub(super) from: usize,
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) got: usize,
    /// Offset of this rank's operand of the reduction: `first`, unless the operand must be preserved.
    pub(super) mine: usize,
    /// How many of the `got` bytes have been reduced.
    pub(super) reduced: usize,
    pub(super) combine: Combine,
    /// The step also sends from this range, so the reduction waits for the end of the step.
    pub(super) deferred: bool,
}

impl Receiving {
    pub(super) fn new(from: usize, range: Range<usize>, mine: usize, combine: Combine) -> Self {
        let (first, len) = (range.start, range.len());
        Self { from, first, len, got: 0, mine, reduced: 0, combine, deferred: false }
    }

    /// Whether the received bytes are reduced with those at `first` as they arrive, and stored there.
    pub(super) fn is_in_place(&self) -> bool {
        self.mine == self.first && !self.deferred
    }

    /// Reduces the whole elements at the front of `bytes`. Returns their length in bytes.
    pub(super) fn reduce_in_place(
        &mut self,
        call: &RunningCall,
        bytes: &[u8],
        memory: &mut Memory<'_>,
    ) -> Result<usize> {
        let waiting = bytes.len().min(self.len - self.got);
        let whole = waiting - waiting % call.dtype.size_in_bytes();
        let start = self.first + self.got;
        memory.write_all(start..start + whole, |done, mine| {
            combine_bytes(call.dtype, call.op, self.combine, mine, &bytes[done..done + mine.len()]);
        })?;
        self.reduced += whole;
        Ok(whole)
    }

    /// Reduces the whole elements in the scratch buffer, and moves the remaining bytes to its front.
    pub(super) fn reduce(
        &mut self,
        call: &RunningCall,
        scratch: &mut [u64],
        memory: &mut Memory<'_>,
    ) -> Result<()> {
        let waiting = self.got - self.reduced;
        let whole = waiting - waiting % call.dtype.size_in_bytes();
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(scratch);
        let theirs = &mut bytes[..whole];
        let at = |start: usize| start + self.reduced..start + self.reduced + whole;
        if self.mine == self.first {
            memory.write_all(at(self.first), |done, mine| {
                combine_bytes(call.dtype, call.op, self.combine, mine, &theirs[done..done + mine.len()]);
            })?;
        } else {
            // The result is written to the scratch buffer first, so the operands swap roles.
            let combine =
                if self.combine == Combine::TheirsFirst { Combine::MineFirst } else { Combine::TheirsFirst };
            memory.read_all(at(self.mine), |done, mine| {
                combine_bytes(call.dtype, call.op, combine, &mut theirs[done..done + mine.len()], mine);
            })?;
            memory.write_all(at(self.first), |done, target| {
                target.copy_from_slice(&theirs[done..done + target.len()]);
            })?;
        }
        self.reduced += whole;
        bytes.copy_within(whole..waiting, 0);
        Ok(())
    }
}
