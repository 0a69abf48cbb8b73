//! Links between ranks that are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use crate::transport::links::{Closed, Links, Wait};

use super::shared::LocalGroup;

pub(super) struct LocalLinks {
    rank: usize,
    shared: Arc<LocalGroup>,
    /// The wake-up counter before the streams were last found to be empty or full.
    seen: u64,
    tried: bool,
}

impl LocalLinks {
    pub(super) fn new(rank: usize, shared: Arc<LocalGroup>) -> Self {
        Self { rank, shared, seen: 0, tried: false }
    }

    /// Reads the wake-up counter before the first try after a sleep, so that no wake-up between that try and the next sleep
    /// is missed.
    fn note_wake_ups(&mut self) {
        if !self.tried {
            self.seen = self.shared.wake_ups(self.rank);
            self.tried = true;
        }
    }
}

impl Links for LocalLinks {
    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        self.note_wake_ups();
        self.shared.write(self.rank, peer, [head, body])
    }

    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        self.note_wake_ups();
        self.shared.read(peer, self.rank, into)
    }

    fn wait(&mut self, _waits: &[Wait], timeout: Duration) {
        self.shared.sleep(self.rank, self.seen, timeout);
        self.tried = false;
    }

    fn spins(&self) -> u32 {
        0
    }
}
