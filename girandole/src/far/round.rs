//! Rounds of an elastic run: an average that all groups have made, or none.

use std::ops::Range;

use candle_core::{Device, Tensor, Var};
use comm::{Operation, ReduceOp};
use serde::{Deserialize, Serialize};

use super::FarAverage;
use super::exchange::BucketSum;
use crate::Result;

/// What ranks tell each other in a round, the most of any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Notice {
    /// Why the run is to stop; 0 if it is not.
    pub(crate) stop: u32,
    /// Number of new ranks that wait.
    pub(crate) waiting: u32,
    /// 1 if the loss of a group was not finite before it.
    pub(crate) diverged: u32,
}

/// What a round has received.
#[derive(Debug)]
pub(super) struct Round {
    sums: Vec<(Range<usize>, BucketSum)>,
    buffers: Vec<Tensor>,
    fragments: Vec<usize>,
    notice: Notice,
}

impl FarAverage {
    /// Receives what the groups send, and changes nothing. If this succeeds on any rank, then all have received it and can
    /// [`apply`](Self::apply) it, also those on which it fails because a rank is lost; if it succeeds on none, those that are left begin
    /// the round again. Call on every rank.
    ///
    /// # Cost
    /// That of an average, with one number more of each parameter, in few bits two, until it is applied.
    pub(crate) fn receive(&mut self, step: usize, is_last: bool, own: Notice) -> Result<()> {
        self.received = None;
        // A rank that hears of a loss leaves its group: by then all of it have completed the step.
        self.groups.group.run(Operation::Barrier)?;
        let most = Tensor::new(&[own.stop, own.waiting, own.diverged], &Device::Cpu)?;
        self.groups.world.run(Operation::AllReduce { tensor: most.clone(), op: ReduceOp::Max })?;
        let most = most.to_vec1::<u32>()?;
        let (fragments, mut sums) = (self.due(step, is_last)?, Vec::new());
        self.sums(&fragments, |_, bucket, sum| {
            sums.push((bucket, sum));
            Ok(())
        })?;
        let buffers = self.buffers.iter().map(|buffer| buffer.as_detached_tensor().copy());
        let buffers = buffers.collect::<candle_core::Result<Vec<_>>>()?;
        self.average_buffers(&buffers)?;
        let notice = Notice { stop: most[0], waiting: most[1], diverged: most[2] };
        self.received = Some(Round { sums, buffers, fragments, notice });
        self.groups.wait_for_all()
    }

    /// Steps by what the round has received; `None` if it has not received all of it. Not collective.
    pub(crate) fn apply(&mut self) -> Result<Option<Notice>> {
        let Some(Round { sums, buffers, fragments, notice }) = self.received.take() else { return Ok(None) };
        for (bucket, sums) in sums {
            self.step_by(bucket, &sums)?;
        }
        self.buffers.iter().zip(&buffers).try_for_each(|(buffer, mean): (&Var, _)| buffer.set(mean))?;
        fragments.into_iter().for_each(|fragment| self.sent_targets[fragment] = 0);
        Ok(Some(notice))
    }

    /// A new group begins where the others were after their last average.
    pub(crate) fn begin_anew(&mut self) -> Result<()> {
        self.forget_unsent();
        for slot in &mut self.slots {
            let start = slot.start()?;
            slot.var.set(&start)?;
            slot.sent = slot.sent.take().map(|_| start);
        }
        Ok(())
    }
}
