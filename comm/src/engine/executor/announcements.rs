//! Announcements: what a rank says of its call before its data, so that ranks detect that their calls differ.

use crate::Result;
use crate::algorithm::schedule::Schedule;
use crate::base::fingerprint::{self, Fingerprint};
use crate::base::last_message::LastMessage;
use crate::failure::diagnosis::Question;
use crate::transport::links::Links;

use super::{Peer, ScheduleExecutor, Task, find_mut};

impl<L: Links> ScheduleExecutor<L> {
    /// Sets up the announcements of a call. They are sent in both directions between any two ranks that exchange
    /// anything, so that both detect a mismatch.
    pub(super) fn set_up_announcements(&mut self, task: &Task<'_>, schedule: &Schedule) {
        self.timeouts.begin(self.links.spins());
        self.waiting_since = None;
        self.call.fingerprint = task.fingerprint;
        (self.call.op, self.call.dtype) = (task.op, task.dtype);
        self.call.peers.clear();
        self.call.peers.extend(schedule.peers().into_iter().map(|rank| {
            let fingerprint = match task.pairs.get(rank) {
                Some(pair) => task.fingerprint.detail(*pair),
                None => task.fingerprint,
            };
            let (mine, announcement) = (fingerprint.encode(), [0; fingerprint::LEN]);
            let (sending, receiving) = (false, false);
            Peer { rank, fingerprint, mine, sent: 0, announcement, received: 0, sending, receiving }
        }));
    }

    /// Reads a peer's announcement, which precedes its data. Returns `None` while it is incomplete, `Some(true)` when
    /// this call has completed it, `Some(false)` if it was complete before.
    pub(super) fn read_announcement(&mut self, from: usize) -> Result<Option<bool>> {
        let Some(peer) = find_mut(&mut self.call.peers, from) else {
            return Ok(Some(false));
        };
        if peer.received == fingerprint::LEN {
            return Ok(Some(false));
        }
        let Ok(got) = self.links.try_recv(from, &mut peer.announcement[peer.received..]) else {
            return Err(self.stream_ended(from));
        };
        peer.received += got;
        if peer.received < fingerprint::LEN {
            return Ok(None);
        }
        let mine = peer.fingerprint;
        match Fingerprint::decode(&peer.announcement) {
            Some(theirs) if theirs == mine => Ok(Some(true)),
            Some(theirs) => Err(self.failed(Question::Mismatch { peer: from, mine, theirs })),
            None => Err(match LastMessage::decode(&peer.announcement) {
                Some(words) => self.failed(Question::lost(from, Some(words))),
                None => self.failed(Question::Garbage { peer: from }),
            }),
        }
    }
}
