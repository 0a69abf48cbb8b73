//! Noticing that ranks end, in the order in which they do.

use std::sync::mpsc::Sender;
use std::thread::{Builder, JoinHandle};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::supervise::Event;

/// Sends [`Event::Exited`] for each rank, without reaping it: its process id stays taken until the receiver does.
///
/// On Linux one `epoll` holds a handle of each process. Its ready list is in the order of the exits, however late the
/// thread that reads it is scheduled. Elsewhere, or where the kernel has no such handles, one thread waits for each.
pub(super) struct Watch {
    events: Sender<Event>,
    #[cfg(target_os = "linux")]
    epoll: Option<ordered::Exits>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn new(events: &Sender<Event>) -> Self {
        Self {
            events: events.clone(),
            #[cfg(target_os = "linux")]
            epoll: ordered::Exits::new().ok(),
            threads: Vec::new(),
        }
    }

    /// Adds a child of this process that has not been reaped.
    pub(super) fn add(&mut self, rank: usize, pid: Pid) -> std::io::Result<()> {
        #[cfg(target_os = "linux")]
        if self.epoll.as_mut().is_some_and(|epoll| epoll.add(rank, pid).is_ok()) {
            return Ok(());
        }
        let events = self.events.clone();
        let wait = move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(pid), options), Err(rustix::io::Errno::INTR)) {}
            // Nobody listens any more where the launcher has given up.
            let _ = events.send(Event::Exited(rank));
        };
        self.threads.push(Builder::new().name("wait".into()).spawn(wait)?);
        Ok(())
    }

    /// Call once all are added: from now on the events come.
    pub(super) fn run(&mut self) -> std::io::Result<()> {
        #[cfg(target_os = "linux")]
        if let Some(epoll) = self.epoll.take() {
            let events = self.events.clone();
            self.threads.push(Builder::new().name("wait".into()).spawn(move || epoll.run(&events))?);
        }
        Ok(())
    }

    /// Waits for the threads to end, which they do when all ranks have.
    pub(super) fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // It only fails if it panicked, and then it has ended.
            let _ = thread.join();
        }
    }
}

#[cfg(target_os = "linux")]
mod ordered {
    use std::os::fd::OwnedFd;
    use std::sync::mpsc::Sender;

    use rustix::buffer::spare_capacity;
    use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
    use rustix::io::{Errno, Result};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::Event;

    pub(super) struct Exits {
        epoll: OwnedFd,
        /// By place of adding, with the rank.
        processes: Vec<(usize, OwnedFd)>,
    }

    impl Exits {
        pub(super) fn new() -> Result<Self> {
            Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)?, processes: Vec::new() })
        }

        pub(super) fn add(&mut self, rank: usize, pid: Pid) -> Result<()> {
            let process = pidfd_open(pid, PidfdFlags::empty())?;
            let data = EventData::new_u64(self.processes.len() as u64);
            epoll::add(&self.epoll, &process, data, EventFlags::IN | EventFlags::ONESHOT)?;
            self.processes.push((rank, process));
            Ok(())
        }

        pub(super) fn run(self, events: &Sender<Event>) {
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
                        // Nobody listens any more where the launcher has given up.
                        let _ = events.send(Event::Exited(*rank));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Three processes that end one after the other, in an order that is not that of starting.
    fn exits_in_order(watch: impl FnOnce(&Sender<Event>) -> Watch) {
        let (sender, events) = channel();
        let mut watch = watch(&sender);
        let cat = || Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut children: Vec<Child> = (0..3).map(|_| cat()).collect();
        for (rank, child) in children.iter().enumerate() {
            watch.add(rank, Pid::from_child(child)).unwrap();
        }
        watch.run().unwrap();
        for rank in [1, 2, 0] {
            drop(children[rank].stdin.take());
            let event = events.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(matches!(event, Event::Exited(other) if other == rank), "rank {rank} was to end");
            assert!(children[rank].wait().unwrap().success());
        }
        watch.join();
    }

    #[test]
    fn ends_are_seen_as_they_come() {
        exits_in_order(Watch::new);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn ends_are_seen_without_handles_of_processes_too() {
        exits_in_order(|events| Watch { epoll: None, ..Watch::new(events) });
    }
}
