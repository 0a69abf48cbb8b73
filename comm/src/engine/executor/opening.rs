//! Before anything else in a call: there must be streams to the peers that it needs.

use crate::blame::patience::blame;
use crate::blame::verdict::Question;
use crate::transport::links::{Links, Unopened, Wait};
use crate::{Error, Result};

use super::Executor;

impl<L: Links> Executor<L> {
    /// Waits until there is a stream to each peer of the call, as patiently as for any byte.
    pub(super) fn open(&mut self) -> Result<()> {
        // Where all are there, which is all but the first time, nothing else is done.
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
