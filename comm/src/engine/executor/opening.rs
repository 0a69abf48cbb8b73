//! Opening the streams to the peers that a call needs, before anything is sent.

use crate::failure::diagnosis::Question;
use crate::failure::timeouts::failure_error;
use crate::transport::links::{Links, OpenError, Wait};
use crate::{Error, Result};

use super::ScheduleExecutor;

impl<L: Links> ScheduleExecutor<L> {
    /// Waits until there is a stream to each peer of the call, with the same time-out and checks as any other wait.
    pub(super) fn open(&mut self) -> Result<()> {
        // Usually all streams exist already, and this returns at once.
        self.timeouts.reset_to_sleep();
        loop {
            self.waits.clear();
            let peers = self.call.peers.len();
            // Each rank begins with the one after it, so that not all come to the same one at once.
            let first = self.call.peers.partition_point(|peer| peer.rank < self.supervisor.rank());
            for index in (first..peers).chain(0..first) {
                let peer = self.call.peers[index].rank;
                match self.links.open(peer) {
                    Ok(true) => {}
                    Ok(false) => self.waits.push(Wait { peer, read: true, write: false }),
                    Err(why) => return Err(self.open_error(peer, why)),
                }
            }
            if self.waits.is_empty() {
                return Ok(());
            }
            self.wait()?;
        }
    }

    fn open_error(&self, peer: usize, why: OpenError) -> Error {
        let question = match why {
            OpenError::Here(reason) => {
                let (rank, host) = (self.supervisor.members().world_rank(peer), self.supervisor.host(peer));
                return Error::system(format!("connecting to rank {rank} (host {host})"), reason);
            }
            OpenError::Closed => Question::lost(peer, None),
            OpenError::Left(words) => Question::lost(peer, Some(words)),
            OpenError::Unreachable(detail) => Question::Unreached { peer, detail },
        };
        failure_error(&*self.supervisor, question, &self.call.fingerprint)
    }
}
