//! One receive of a step: what has come, and how it is reduced.

use std::ops::Range;

use crate::Result;
use crate::algorithm::schedule::Combine;
use crate::base::buffer::element::combine_bytes;
use crate::engine::memory::Memory;

use super::Call;

/// All in bytes.
pub(super) struct Receiving {
    pub(super) from: usize,
    pub(super) first: usize,
    pub(super) len: usize,
    pub(super) got: usize,
    /// Where what it is reduced with begins: `first`, unless that stays as it is.
    pub(super) mine: usize,
    /// How much of `got` has been reduced.
    pub(super) reduced: usize,
    pub(super) combine: Combine,
    /// What is there must be sent first, so reduction waits for the end of the step.
    pub(super) deferred: bool,
}

impl Receiving {
    pub(super) fn new(from: usize, range: Range<usize>, mine: usize, combine: Combine) -> Self {
        let (first, len) = (range.start, range.len());
        Self { from, first, len, got: 0, mine, reduced: 0, combine, deferred: false }
    }

    /// What arrives is reduced with what is there, and stays there.
    pub(super) fn is_in_place(&self) -> bool {
        self.mine == self.first && !self.deferred
    }

    /// Reduces the whole elements at the front of `bytes`; how many bytes these are.
    pub(super) fn reduce_in_place(
        &mut self,
        call: &Call,
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

    /// Reduces the whole elements that wait in the scratch, and moves the rest to its front.
    pub(super) fn reduce(&mut self, call: &Call, scratch: &mut [u64], memory: &mut Memory<'_>) -> Result<()> {
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
            // Seen from the scratch, the roles are exchanged.
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
