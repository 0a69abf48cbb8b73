//! Links between ranks that are threads of one process.

use std::sync::Arc;
use std::time::Duration;

use crate::transport::links::{Closed, Links, Wait};

use super::shared::LocalGroup;

pub(super) struct LocalLinks {
    rank: usize,
    shared: Arc<LocalGroup>,
    /// The bell's counter before the streams were last found to be empty or full.
    heard: u64,
    tried: bool,
}

impl LocalLinks {
    pub(super) fn new(rank: usize, shared: Arc<LocalGroup>) -> Self {
        Self { rank, shared, heard: 0, tried: false }
    }

    /// Reads the bell's counter before the first try after a sleep, so that no ring between that try and the next sleep
    /// is missed.
    fn note_rings(&mut self) {
        if !self.tried {
            self.heard = self.shared.rings(self.rank);
            self.tried = true;
        }
    }
}

impl Links for LocalLinks {
    fn try_send(&mut self, peer: usize, head: &[u8], body: &[u8]) -> Result<usize, Closed> {
        self.note_rings();
        self.shared.write(self.rank, peer, [head, body])
    }

    fn try_recv(&mut self, peer: usize, into: &mut [u8]) -> Result<usize, Closed> {
        self.note_rings();
        self.shared.read(peer, self.rank, into)
    }

    fn wait(&mut self, _waits: &[Wait], timeout: Duration) {
        self.shared.sleep(self.rank, self.heard, timeout);
        self.tried = false;
    }

    fn spins(&self) -> u32 {
        0
    }
}
