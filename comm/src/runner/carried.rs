//! Operations whose data a carrier moves: the ranks agree over the links, the carrier does the rest.

use crate::algorithm::{dissemination_barrier, pairwise_all_to_all};
use crate::carrier::Carrier;
use crate::executor::Task;
use crate::links::Links;
use crate::memory::Memory;
use crate::plan::Planner;
use crate::schedule::{Parts, Schedule};
use crate::{Operation, ReduceOp, Result};

use super::Runner;

impl<L: Links> Runner<L> {
    pub(super) fn is_carried(&self, operation: &Operation) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.takes(operation))
    }

    pub(super) fn carry(&mut self, operation: &Operation) -> Result<()> {
        let Some(mut carrier) = self.carrier.take() else { return Ok(()) };
        let bytes = carrier.bytes();
        let result = match operation {
            Operation::Send { .. } | Operation::Recv { .. } | Operation::Batch { .. } => {
                self.carry_messages(&mut *carrier, operation)
            }
            _ => self.carry_collective(&mut *carrier, operation),
        };
        if result.is_err() {
            carrier.abandon();
        }
        self.stats.bytes_sent += carrier.bytes().0 - bytes.0;
        self.stats.bytes_received += carrier.bytes().1 - bytes.1;
        self.carrier = Some(carrier);
        result
    }

    fn carry_messages(&mut self, carrier: &mut dyn Carrier, operation: &Operation) -> Result<()> {
        let Some((mut parcels, _)) = self.messages(operation) else { return Ok(()) };
        for parcel in &mut parcels {
            (parcel.fingerprint, parcel.range) = (parcel.fingerprint.carried(), 0..0);
        }
        let Some(first) = parcels.first() else { return Ok(()) };
        self.supervisor.begin(first.fingerprint);
        let result = carrier.begin(operation).and_then(|()| self.executor.exchange_beside(parcels, carrier));
        result.inspect_err(|_| self.supervisor.hang_up(&mut || self.executor.part(&Memory::default())))
    }

    fn carry_collective(&mut self, carrier: &mut dyn Carrier, operation: &Operation) -> Result<()> {
        let fingerprint = self.fingerprint(operation).carried();
        self.sequence += 1;
        self.supervisor.begin(fingerprint);
        let (schedule, pairs) = self.agreement(operation)?;
        let task = Task { fingerprint, pairs: &pairs, op: ReduceOp::Max, dtype: candle_core::DType::U8 };
        // What agreeing takes is no payload.
        let payload = (self.executor.bytes_sent, self.executor.bytes_received);
        let agreed = self.executor.run(&task, &schedule, &mut Memory::default().room(1));
        (self.executor.bytes_sent, self.executor.bytes_received) = payload;
        let result =
            agreed.and_then(|()| carrier.begin(operation)).and_then(|()| self.executor.attend(carrier));
        // In the middle of a collective, words would be taken for data.
        result.inspect_err(|_| self.supervisor.hang_up(&mut Vec::new))
    }

    /// Who tells whom of a call: a barrier, so that nobody begins before all have come and agree.
    fn agreement(&self, operation: &Operation) -> Result<(Schedule, Vec<u64>)> {
        let barrier = dissemination_barrier::schedule(self.rank, self.topology.world_size());
        if !matches!(operation, Operation::AllToAll { input_counts: Some(_), .. }) {
            return Ok((barrier, Vec::new()));
        }
        // What two ranks exchange, only these two know.
        let planner = Planner::new(self.rank, &self.topology);
        let nothing = Parts::uneven(&vec![0; self.topology.world_size()]);
        let all = pairwise_all_to_all::schedule(self.rank, &nothing, &nothing);
        Ok((all.then(barrier), planner.plan(operation)?.pairs))
    }
}
