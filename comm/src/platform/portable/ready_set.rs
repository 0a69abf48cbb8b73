//! ReadySet: which of many connections are ready.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, Result};

/// Connections by number, with what is waited for on each. The system looks at all of them each time.
#[derive(Debug)]
pub(crate) struct ReadySet<T> {
    sources: BTreeMap<usize, (T, PollFlags)>,
}

impl<T: AsFd> ReadySet<T> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { sources: BTreeMap::new() })
    }

    /// Adds a connection under a number that is free.
    pub(crate) fn insert(&mut self, number: usize, source: T, flags: PollFlags) -> Result<()> {
        self.sources.insert(number, (source, flags));
        Ok(())
    }

    /// Changes what is waited for.
    pub(crate) fn change(&mut self, number: usize, flags: PollFlags) -> Result<()> {
        if let Some((_, known)) = self.sources.get_mut(&number) {
            *known = flags;
        }
        Ok(())
    }

    pub(crate) fn remove(&mut self, number: usize) {
        self.sources.remove(&number);
    }

    /// What to poll for: one of these is ready if, and only if, one of the connections is.
    pub(crate) fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        self.sources.values().map(|(source, flags)| (source.as_fd(), *flags))
    }

    /// Returns the numbers of all connections that are ready now, in order.
    pub(crate) fn ready(&self) -> Result<Vec<usize>> {
        let of = |(fd, flags)| PollFd::from_borrowed_fd(fd, flags);
        let mut polled: Vec<PollFd<'_>> = self.fds().map(of).collect();
        loop {
            match poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        let numbers = self.sources.keys().zip(&polled);
        Ok(numbers.filter(|(_, fd)| !fd.revents().is_empty()).map(|(number, _)| *number).collect())
    }
}
