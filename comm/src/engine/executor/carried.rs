//! Waiting for data that a carrier (NCCL, MPI) moves.

use crate::Result;
use crate::engine::executor::MessageTransfer;
use crate::engine::memory::Memory;
use crate::failure::timeouts::library_error;
use crate::transport::carrier::{Carrier, PollBackoff};
use crate::transport::links::Links;

use super::ScheduleExecutor;

impl<L: Links> ScheduleExecutor<L> {
    /// Waits until the operation that the carrier has begun is done, and checks meanwhile over the links for failed
    /// ranks.
    pub(crate) fn wait_for_carrier(&mut self, carrier: &mut dyn Carrier, rank: usize) -> Result<()> {
        self.timeouts.reset();
        let mut nap = PollBackoff::default();
        let (supervisor, fingerprint) = (self.supervisor.clone(), self.call.fingerprint);
        let failed = |error| library_error(&*supervisor, rank, error, &fingerprint);
        while !carrier.poll().map_err(failed)? {
            if let Some(peer) = self.call.peers.first().map(|peer| peer.rank)
                && nap.should_check_peers()
            {
                self.consider(peer)?;
            }
            nap.wait();
        }
        Ok(())
    }

    /// Exchanges the announcements of messages while the carrier moves their data. Their ranges are empty.
    pub(crate) fn exchange_announcements(
        &mut self,
        messages: Vec<MessageTransfer>,
        carrier: &mut dyn Carrier,
        rank: usize,
    ) -> Result<()> {
        let Some(first) = messages.first() else { return Ok(()) };
        let (fingerprint, mut peer, mut memory) = (first.fingerprint, first.peer, Memory::default());
        let mut queues = self.queues(messages, fingerprint);
        self.open()?;
        self.timeouts.reset();
        let mut nap = PollBackoff::default();
        let mut outcome = Ok(false);
        loop {
            let began = self.begin_next(&mut queues);
            if let Ok(false) = outcome {
                outcome = carrier.poll();
            }
            // If the carrier fails, the peers' announcements may explain why.
            match (&outcome, queues.is_empty()) {
                (Ok(false), _) | (_, false) => {}
                (_, true) => {
                    let failed = |error| library_error(&*self.supervisor, rank, error, &fingerprint);
                    return outcome.map(drop).map_err(failed);
                }
            }
            self.waits.clear();
            let moved = self.send_some(&memory)? | self.receive_some(&mut memory)?;
            if moved || began {
                self.timeouts.reset();
                nap = PollBackoff::default();
                continue;
            }
            if let Some(wait) = self.waits.iter().find(|wait| wait.read).or(self.waits.first()) {
                peer = wait.peer;
            }
            if nap.should_check_peers() {
                self.consider(peer)?;
            }
            nap.wait();
        }
    }
}
