//! Operations whose data is moved by a carrier (NCCL, MPI): the ranks agree on the call over the links, then the
//! carrier moves the data.

use crate::algorithm::schedule::{Parts, Schedule};
use crate::algorithm::{dissemination_barrier, pairwise_all_to_all};
use crate::base::buffer::staging::Before;
use crate::base::fingerprint::Fingerprint;
use crate::engine::executor::Task;
use crate::engine::memory::Memory;
use crate::failure::timeouts::library_error;
use crate::transport::carrier::Carrier;
use crate::transport::links::Links;
use crate::{Operation, ReduceOp, Result};

use super::OperationRunner;

impl<L: Links> OperationRunner<L> {
    pub(super) fn is_carried(&self, operation: &Operation) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.takes(operation))
    }

    pub(super) fn carry(&mut self, operation: &Operation, before: &Before) -> Result<()> {
        let Some(mut carrier) = self.carrier.take() else { return Ok(()) };
        let bytes = carrier.bytes();
        let result = match operation {
            Operation::Send { .. } | Operation::Recv { .. } | Operation::Batch { .. } => {
                self.carry_messages(&mut *carrier, operation, before)
            }
            _ => self.carry_collective(&mut *carrier, operation, before),
        };
        if result.is_err() {
            carrier.abandon();
        }
        self.stats.bytes_sent += carrier.bytes().0 - bytes.0;
        self.stats.bytes_received += carrier.bytes().1 - bytes.1;
        self.carrier = Some(carrier);
        result
    }

    fn carry_messages(
        &mut self,
        carrier: &mut dyn Carrier,
        operation: &Operation,
        before: &Before,
    ) -> Result<()> {
        let Some((mut messages, _)) = self.messages(operation) else { return Ok(()) };
        for message in &mut messages {
            (message.fingerprint, message.range) = (message.fingerprint.carried(), 0..0);
        }
        let Some(first) = messages.first() else { return Ok(()) };
        self.supervisor.begin(first.fingerprint);
        let call = first.fingerprint;
        let result = match operation {
            // Once begun, a receive occupies the device, and its sender may wait for other work of the same device. So
            // a single receive begins only after its sender has announced the message. In a batch, the receives may
            // wait for the sends, so nothing is waited for.
            Operation::Recv { .. } => {
                let announced = self.executor.exchange(messages, &mut Memory::default());
                let begun = announced.and_then(|()| self.begin(carrier, operation, before, call));
                begun.and_then(|()| self.executor.wait_for_carrier(carrier, self.rank))
            }
            _ => {
                let begun = self.begin(carrier, operation, before, call);
                begun.and_then(|()| self.executor.exchange_announcements(messages, carrier, self.rank))
            }
        };
        result.inspect_err(|_| {
            self.supervisor.close_streams(&mut || self.executor.finish_sends(&Memory::default()))
        })
    }

    fn carry_collective(
        &mut self,
        carrier: &mut dyn Carrier,
        operation: &Operation,
        before: &Before,
    ) -> Result<()> {
        let fingerprint = self.fingerprint(operation).carried();
        self.sequence += 1;
        self.supervisor.begin(fingerprint);
        let (schedule, pairs) = self.agreement(operation)?;
        let task = Task { fingerprint, pairs: &pairs, op: ReduceOp::Max, dtype: candle_core::DType::U8 };
        // The bytes of the agreement do not count as payload.
        let payload = (self.executor.bytes_sent, self.executor.bytes_received);
        let agreed = self.executor.run(&task, &schedule, &mut Memory::default().scratch(1));
        (self.executor.bytes_sent, self.executor.bytes_received) = payload;
        let result = agreed
            .and_then(|()| self.begin(carrier, operation, before, fingerprint))
            .and_then(|()| self.executor.wait_for_carrier(carrier, self.rank));
        // In the middle of a collective, a failure report would be taken for data, so it is sent to no rank.
        result.inspect_err(|_| self.supervisor.close_streams(&mut Vec::new))
    }

    fn begin(
        &self,
        carrier: &mut dyn Carrier,
        operation: &Operation,
        before: &Before,
        call: Fingerprint,
    ) -> Result<()> {
        let begun = carrier.begin(operation, before);
        begun.map_err(|error| library_error(&*self.supervisor, self.rank, error, &call))
    }

    /// Returns the schedule by which the ranks agree on a call: a barrier, so that no rank begins before all have come
    /// and agree.
    fn agreement(&self, operation: &Operation) -> Result<(Schedule, Vec<u64>)> {
        let world_size = self.planner.world_size();
        let barrier = dissemination_barrier::schedule(self.rank, world_size);
        let uneven = match operation {
            Operation::AllToAll { input_counts, output_counts, .. } => {
                input_counts.is_some() || output_counts.is_some()
            }
            _ => false,
        };
        if !uneven {
            return Ok((barrier, Vec::new()));
        }
        // The counts of a pair are known to these two ranks only, so each pair must exchange announcements.
        let nothing = Parts::uneven(&vec![0; world_size]);
        let all = pairwise_all_to_all::schedule(self.rank, &nothing, &nothing);
        Ok((all.then(barrier), self.planner.plan(operation)?.pairs))
    }
}
