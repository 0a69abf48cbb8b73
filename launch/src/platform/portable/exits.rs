//! The ends of child processes in the order in which they come: POSIX does not tell that order.

use rustix::io::{Errno, Result};
use rustix::process::Pid;

/// What there is none of.
pub(crate) enum Exits {}

impl Exits {
    /// Fails where the system has no such thing.
    pub(crate) fn new() -> Result<Self> {
        Err(Errno::NOSYS)
    }

    /// Adds a child of this process that has not been reaped.
    pub(crate) fn add(&mut self, _: usize, _: Pid) -> Result<()> {
        match *self {}
    }

    /// Tells the rank of each process that ends, without reaping it, until all have.
    pub(crate) fn run(self, _: impl FnMut(usize)) {
        match self {}
    }
}
