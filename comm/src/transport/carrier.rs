//! Libraries that move a group's data in place of our links: MPI, NCCL. The links stay for what these libraries do not do:
//! over them the ranks agree on each call before it begins, and watch over each other while it lasts.

use std::time::Duration;

use crate::base::buffer::staging::Before;
use crate::{Operation, Result};

/// Moves on what a library keeps to itself of calls that are done.
pub(crate) type Pump = Box<dyn Fn() + Send>;

/// What moves the data of a group's operations, one operation at a time, and never blocks.
pub(crate) trait Carrier: Send {
    /// Whether it moves the data of this operation. What it does not take goes over the links.
    fn takes(&self, operation: &Operation) -> bool;

    /// Begins an operation. Of a collective, all ranks have agreed on it, and who sends a single message to this rank has
    /// come; of other messages, nothing is known of the peers yet.
    /// It comes after what the devices have to compute `before`.
    fn begin(&mut self, operation: &Operation, before: &Before) -> Result<()>;

    /// True once all that was begun is done, and the tensors hold it.
    fn poll(&mut self) -> Result<bool>;

    /// What was begun will not end: from now on nothing that belongs to it is used by anybody else.
    fn abandon(&mut self);

    /// What peers may wait for although this rank's calls are done, where there is such a thing.
    fn pump(&self) -> Option<Pump> {
        None
    }

    /// Bytes sent and received so far.
    fn bytes(&self) -> (u64, u64);
}

/// Waits between two looks at something that cannot wake anybody: shortly at first, since most calls are short.
#[derive(Debug, Default)]
pub(crate) struct Nap {
    looks: u32,
}

impl Nap {
    /// Looks during which the processor is kept, and then those after which it is only offered to others.
    const KEEPING: u32 = 64;
    const OFFERING: u32 = 4096;
    const SLEEP: Duration = Duration::from_micros(50);

    pub(crate) fn take(&mut self) {
        self.looks = self.looks.saturating_add(1);
        if self.looks < Self::KEEPING {
            std::hint::spin_loop();
        } else if self.looks < Self::OFFERING {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Self::SLEEP);
        }
    }

    /// Whether it is time to look after the other ranks, too.
    pub(crate) fn is_long(&self) -> bool {
        self.looks >= Self::KEEPING && self.looks.is_multiple_of(16)
    }
}
