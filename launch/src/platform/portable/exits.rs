//! Exits of child processes in the order in which they happen: not available, because POSIX does not report that order.

use rustix::io::{Errno, Result};
use rustix::process::Pid;

/// Has no values: `new` always fails.
pub(crate) enum Exits {}

impl Exits {
    /// Fails, because the system has no such feature.
    pub(crate) fn new() -> Result<Self> {
        Err(Errno::NOSYS)
    }

    /// Adds a child of this process that has not been reaped.
    pub(crate) fn add(&mut self, _: usize, _: Pid) -> Result<()> {
        match *self {}
    }

    /// Calls `ended` with the rank of each process that ends, without reaping it, until all have ended.
    pub(crate) fn run(self, _: impl FnMut(usize)) {
        match self {}
    }
}
