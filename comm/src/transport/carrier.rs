//! Carriers: libraries that move a group's data in place of our links (MPI, NCCL). The links are still used for what
//! these libraries do not do: over them the ranks agree on each call before it begins, and detect failed ranks while it
//! runs.

use std::time::Duration;

use crate::base::buffer::staging::Before;
use crate::{Operation, Result};

/// Drives the library's progress on calls that are already done for this rank.
pub(crate) type Pump = Box<dyn Fn() + Send>;

/// Moves the data of a group's operations, one operation at a time, and never blocks.
pub(crate) trait Carrier: Send {
    /// Returns whether this carrier moves the data of `operation`. Operations that it does not take go over the links.
    fn takes(&self, operation: &Operation) -> bool;

    /// Starts an operation, after the device work that `before` stands for. A collective: all ranks have agreed on it. A
    /// single receive: its sender has announced the message. Other messages: nothing is known of the peers yet.
    fn begin(&mut self, operation: &Operation, before: &Before) -> Result<()>;

    /// Returns true once everything that was begun is done and the tensors hold the results.
    fn poll(&mut self) -> Result<bool>;

    /// Gives up on what was begun, which will not finish. Memory that the library may still use is not freed or reused.
    fn abandon(&mut self);

    /// Returns a function that drives the library's progress on messages that peers may wait for although this rank's
    /// calls are done; None where the library needs none.
    fn pump(&self) -> Option<Pump> {
        None
    }

    /// Returns the bytes sent and received so far.
    fn bytes(&self) -> (u64, u64);
}

/// Back-off between polls of something that cannot wake a thread: short at first, since most calls are short.
#[derive(Debug, Default)]
pub(crate) struct PollBackoff {
    polls: u32,
}

impl PollBackoff {
    /// `wait` spins up to `SPINS` polls, then yields up to `YIELDS` polls, then sleeps.
    const SPINS: u32 = 64;
    const YIELDS: u32 = 4096;
    const SLEEP: Duration = Duration::from_micros(50);

    pub(crate) fn wait(&mut self) {
        self.polls = self.polls.saturating_add(1);
        if self.polls < Self::SPINS {
            std::hint::spin_loop();
        } else if self.polls < Self::YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Self::SLEEP);
        }
    }

    /// Returns whether it is time to check on the other ranks too: every 16 polls, once the thread no longer spins.
    pub(crate) fn should_check_peers(&self) -> bool {
        self.polls >= Self::SPINS && self.polls.is_multiple_of(16)
    }
}
