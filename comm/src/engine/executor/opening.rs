//! Opening the streams to the peers that a call needs, before anything is sent.

use crate::blame::patience::blame;
use crate::blame::verdict::Question;
use crate::transport::links::{Links, Unopened, Wait};
use crate::{Error, Result};

use super::Executor;

impl<L: Links> Executor<L> {
    /// Waits until there is a stream to each peer of the call, with the same time-out and checks as any other wait.
    pub(super) fn open(&mut self) -> Result<()> {
        // Usually all streams exist already, and this returns at once.
        self.patience.reset_to_sleep();
        loop {
            self.waits.clear();
            for index in 0..self.call.peers.len() {
                let peer = self.call.peers[index].rank;
                match self.links.open(peer) {
                    Ok(true) => {}
                    Ok(false) => self.waits.push(Wait { peer, read: true, write: false }),
                    Err(why) => return Err(self.unopened(peer, why)),
                }
            }
            if self.waits.is_empty() {
                return Ok(());
            }
            self.wait()?;
        }
    }

    fn unopened(&self, peer: usize, why: Unopened) -> Error {
        let question = match why {
            Unopened::Here(reason) => {
                let (rank, host) = (self.supervisor.members().world_rank(peer), self.supervisor.host(peer));
                return Error::system(format!("connecting to rank {rank} (host {host})"), reason);
            }
            Unopened::Closed => Question::lost(peer, None),
            Unopened::Left(words) => Question::lost(peer, Some(words)),
            Unopened::Unreachable(detail) => Question::Unreached { peer, detail },
        };
        blame(&*self.supervisor, question, &self.call.fingerprint)
    }
}
