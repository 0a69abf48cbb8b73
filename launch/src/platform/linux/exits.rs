//! Exits of child processes, in the order in which they happen (epoll on pidfds).

use std::os::fd::OwnedFd;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::{Errno, Result};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// One `epoll` instance with a pidfd for each process. Its ready list is in the order of the exits, however late the
/// reading thread is scheduled.
pub(crate) struct Exits {
    epoll: OwnedFd,
    /// Rank and pidfd of each process; the index is the epoll event's data.
    processes: Vec<(usize, OwnedFd)>,
}

impl Exits {
    /// Creates the epoll instance. Fails if the system does not support it.
    pub(crate) fn new() -> Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, processes: Vec::new() })
    }

    /// Adds a child of this process that has not been reaped.
    pub(crate) fn add(&mut self, rank: usize, pid: Pid) -> Result<()> {
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let data = EventData::new_u64(self.processes.len() as u64);
        epoll::add(&self.epoll, &process, data, EventFlags::IN | EventFlags::ONESHOT)?;
        self.processes.push((rank, process));
        Ok(())
    }

    /// Calls `ended` with the rank of each process that ends, without reaping it, until all have ended.
    pub(crate) fn run(self, mut ended: impl FnMut(usize)) {
        let mut left = self.processes.len();
        let mut ready = Vec::with_capacity(left);
        while left > 0 {
            match epoll::wait(&self.epoll, spare_capacity(&mut ready), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(_) => return,
            }
            left = left.saturating_sub(ready.len());
            for event in ready.drain(..) {
                if let Some((rank, _)) = self.processes.get(event.data.u64() as usize) {
                    ended(*rank);
                }
            }
        }
    }
}
