//! Reports the exits of ranks, in the order in which they happen.

use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::thread::{Builder, JoinHandle};

use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use super::event::Event;
use crate::platform::Exits;

/// Sends [`Event::Exited`] for each rank, without reaping it: its process id stays taken until the receiver does.
///
/// Where the system reports exits in their order, one thread waits for all of them ([`Exits`]); elsewhere there is one
/// thread for each.
pub(super) struct Watch {
    events: Sender<Event>,
    exits: Option<Exits>,
    /// Of the ranks that `exits` reports.
    pids: HashMap<usize, Pid>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    pub(super) fn new(events: &Sender<Event>) -> Self {
        Self { events: events.clone(), exits: Exits::new().ok(), pids: HashMap::new(), threads: Vec::new() }
    }

    /// Adds a child of this process that has not been reaped.
    pub(super) fn add(&mut self, rank: usize, pid: Pid) -> std::io::Result<()> {
        if self.exits.as_mut().is_some_and(|exits| exits.add(rank, pid).is_ok()) {
            self.pids.insert(rank, pid);
            return Ok(());
        }
        let events = self.events.clone();
        let wait = move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(pid), options), Err(rustix::io::Errno::INTR)) {}
            // The receiver is gone if the launcher has given up.
            let _ = events.send(exited(rank, pid));
        };
        self.threads.push(Builder::new().name("wait".into()).spawn(wait)?);
        Ok(())
    }

    /// Starts the thread that sends the events. Call once all ranks are added.
    pub(super) fn run(&mut self) -> std::io::Result<()> {
        if let Some(exits) = self.exits.take() {
            let (events, pids) = (self.events.clone(), std::mem::take(&mut self.pids));
            let tell = move |rank| {
                if let Some(pid) = pids.get(&rank) {
                    // The receiver is gone if the launcher has given up.
                    let _ = events.send(exited(rank, *pid));
                }
            };
            self.threads.push(Builder::new().name("wait".into()).spawn(move || exits.run(tell))?);
        }
        Ok(())
    }

    /// Waits for the threads to end, which they do when all ranks have ended.
    pub(super) fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // `join` fails only if the thread panicked, and then it has ended.
            let _ = thread.join();
        }
    }
}

fn exited(local_rank: usize, pid: Pid) -> Event {
    Event::Exited { local_rank, pid: pid.as_raw_nonzero().get().cast_unsigned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    /// Tests three processes that end one after the other, in another order than they were started.
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
            let pid = children[rank].id();
            let is_expected = |other, of| (other, of) == (rank, pid);
            assert!(
                matches!(event, Event::Exited { local_rank, pid } if is_expected(local_rank, pid)),
                "rank {rank} was to end"
            );
            assert!(children[rank].wait().unwrap().success());
        }
        watch.join();
    }

    #[test]
    fn ends_are_seen_as_they_come() {
        exits_in_order(Watch::new);
    }

    #[test]
    fn ends_are_seen_without_handles_of_processes_too() {
        exits_in_order(|events| Watch { exits: None, ..Watch::new(events) });
    }
}
