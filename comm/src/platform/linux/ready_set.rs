//! ReadySet: which of many connections are ready, at a cost that depends on how many of them are, not on how many there are.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::buffer::spare_capacity;
use rustix::event::{PollFlags, Timespec, epoll};
use rustix::io::{Errno, Result};

/// Connections by number, with what is waited for on each, in an epoll set.
#[derive(Debug)]
pub(crate) struct ReadySet<T> {
    epoll: OwnedFd,
    sources: BTreeMap<usize, (T, PollFlags)>,
}

impl<T: AsFd> ReadySet<T> {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, sources: BTreeMap::new() })
    }

    /// Adds a connection under a number that is free.
    pub(crate) fn insert(&mut self, number: usize, source: T, flags: PollFlags) -> Result<()> {
        epoll::add(&self.epoll, &source, data(number), events(flags))?;
        self.sources.insert(number, (source, flags));
        Ok(())
    }

    /// Changes what is waited for.
    pub(crate) fn change(&mut self, number: usize, flags: PollFlags) -> Result<()> {
        match self.sources.get_mut(&number) {
            Some((source, known)) if *known != flags => {
                epoll::modify(&self.epoll, &*source, data(number), events(flags))?;
                *known = flags;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn remove(&mut self, number: usize) {
        if let Some((source, _)) = self.sources.remove(&number) {
            // Cannot fail for what is in the set.
            let _ = epoll::delete(&self.epoll, &source);
        }
    }

    /// What to poll for: one of these is ready if, and only if, one of the connections is.
    pub(crate) fn fds(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        std::iter::once((self.epoll.as_fd(), PollFlags::IN))
    }

    /// Returns the numbers of all connections that are ready now, in order.
    pub(crate) fn ready(&self) -> Result<Vec<usize>> {
        let mut found = Vec::with_capacity(self.sources.len().max(1));
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut found), Some(&now)) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        let mut numbers: Vec<usize> = found.iter().map(|event| event.data.u64() as usize).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }
}

fn data(number: usize) -> epoll::EventData {
    epoll::EventData::new_u64(number as u64)
}

fn events(flags: PollFlags) -> epoll::EventFlags {
    let mut events = epoll::EventFlags::empty();
    events.set(epoll::EventFlags::IN, flags.contains(PollFlags::IN));
    events.set(epoll::EventFlags::OUT, flags.contains(PollFlags::OUT));
    events
}
