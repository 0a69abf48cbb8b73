//! A group of rank processes, as seen from the test.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;

use crate::ending::Ending;
use crate::rank::{LIMIT, Rank, member};
use crate::worker::{SCRIPT, SLOW_WARNING, now};

/// Configuration of a group.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) timeout: Duration,
    pub(crate) slow_warning: Duration,
    pub(crate) secret: String,
    /// `tcp`, `shm`, or `mixed`: shared memory only between ranks of even number.
    pub(crate) transport: &'static str,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(40),
            slow_warning: Duration::from_secs(30),
            secret: "7b".repeat(32),
            transport: crate::TRANSPORT,
        }
    }
}

pub(crate) struct Group {
    setup: Setup,
    world_size: usize,
    dir: TempDir,
    ranks: Vec<Option<Member>>,
}

struct Member {
    rank: Rank,
    stderr: Receiver<String>,
}

impl Group {
    /// Starts one rank for each script.
    pub(crate) fn start<S: AsRef<str>>(scripts: &[S], setup: &Setup) -> Self {
        let mut group = Self::empty(scripts.len(), setup);
        scripts.iter().enumerate().for_each(|(rank, script)| group.add(rank, script.as_ref()));
        group
    }

    /// Creates a group without ranks; they are added later.
    pub(crate) fn empty(world_size: usize, setup: &Setup) -> Self {
        let ranks = (0..world_size).map(|_| None).collect();
        Self { setup: setup.clone(), world_size, dir: tempfile::tempdir().unwrap(), ranks }
    }

    pub(crate) fn add(&mut self, rank: usize, script: &str) {
        self.ranks[rank] = Some(self.process(rank, script, &self.setup));
    }

    /// Runs a process that does not belong to the group, but knows its rendezvous and claims to be this rank.
    pub(crate) fn pretender(&self, rank: usize, setup: &Setup) -> Ending {
        self.process(rank, "barrier", setup).finish(rank)
    }

    /// Returns the address on which rank 0 listens for the others.
    pub(crate) fn meeting_point(&self) -> SocketAddr {
        let file = std::fs::read(self.dir.path().join("meeting")).unwrap();
        let file: serde_json::Value = serde_json::from_slice(&file).unwrap();
        file["address"].as_str().unwrap().parse().unwrap()
    }

    fn process(&self, rank: usize, script: &str, setup: &Setup) -> Member {
        let mut command = member((rank, self.world_size), self.dir.path(), setup.timeout);
        command
            .env(SCRIPT, script)
            .env(SLOW_WARNING, setup.slow_warning.as_millis().to_string())
            .env("GIRANDOLE_SECRET", &setup.secret)
            .env("GIRANDOLE_TRANSPORT", transport(setup, rank))
            .stderr(Stdio::piped());
        let mut rank = Rank::start(&mut command);
        let (sender, stderr) = channel();
        let mut pipe = rank.process.stderr.take().unwrap();
        std::thread::spawn(move || {
            let mut text = Vec::new();
            pipe.read_to_end(&mut text).unwrap();
            sender.send(String::from_utf8_lossy(&text).into_owned())
        });
        Member { rank, stderr }
    }

    fn rank(&mut self, rank: usize) -> &mut Rank {
        &mut self.ranks[rank].as_mut().unwrap().rank
    }

    /// Waits until these ranks have reported that they are ready.
    pub(crate) fn ready(&mut self, ranks: impl IntoIterator<Item = usize>) {
        for rank in ranks {
            let process = self.rank(rank);
            assert!(process.reads("@ready"), "rank {rank} is not ready: {:?}", process.read);
        }
    }

    pub(crate) fn all(&self) -> std::ops::Range<usize> {
        0..self.world_size
    }

    pub(crate) fn pid(&self, rank: usize) -> Pid {
        Pid::from_child(&self.ranks[rank].as_ref().unwrap().rank.process)
    }

    /// Sends a signal to a rank; returns the time.
    pub(crate) fn signal(&self, rank: usize, signal: Signal) -> u64 {
        let at = now();
        kill_process(self.pid(rank), signal).unwrap();
        at
    }

    /// Sends a rank the line for which it waits.
    pub(crate) fn tell(&mut self, rank: usize) {
        self.rank(rank).stdin.write_all(b"go\n").unwrap();
    }

    pub(crate) fn tell_all(&mut self, ranks: impl IntoIterator<Item = usize>) {
        ranks.into_iter().for_each(|rank| self.tell(rank));
    }

    /// Waits until a rank has ended.
    pub(crate) fn finish(&mut self, rank: usize) -> Ending {
        self.ranks[rank].take().unwrap().finish(rank)
    }

    /// Waits until all ranks have ended that were not waited for.
    pub(crate) fn finish_all(mut self) -> Vec<Ending> {
        let present: Vec<usize> = self.all().filter(|rank| self.ranks[*rank].is_some()).collect();
        let endings = present.into_iter().map(|rank| self.finish(rank)).collect();
        assert_eq!(files(self.dir.path()), [""; 0], "files are left");
        assert_eq!(memory_left(), [""; 0], "memory is left");
        endings
    }

    /// Waits until all have ended, and asserts that each has completed its script.
    pub(crate) fn assert_all_done(self) {
        let endings = self.finish_all();
        // If one has failed, the output has the endings of all.
        assert!(endings.iter().all(Ending::is_done), "{endings:#?}");
        endings.iter().for_each(Ending::assert_done);
    }
}

fn transport(setup: &Setup, rank: usize) -> &'static str {
    match (setup.transport, rank % 2) {
        ("mixed", 0) => "auto",
        ("mixed", _) => "tcp",
        (transport, _) => transport,
    }
}

pub(crate) fn files(folder: &Path) -> Vec<String> {
    let files = std::fs::read_dir(folder).unwrap().flatten();
    files.map(|file| file.file_name().to_string_lossy().into_owned()).collect()
}

/// Returns shared memory with a name of this project that is left.
pub(crate) fn memory_left() -> Vec<String> {
    let names = || {
        let mut names = files(Path::new("/dev/shm"));
        names.retain(|name| name.contains("girandole"));
        names
    };
    let mut left = names();
    if !left.is_empty() {
        // Shared memory may have a name for a moment while it is created.
        std::thread::sleep(Duration::from_millis(100));
        let still = names();
        left.retain(|name| still.contains(name));
    }
    left
}

impl Member {
    fn finish(self, number: usize) -> Ending {
        let mut rank = self.rank;
        let handle = pidfd_open(Pid::from_child(&rank.process), PidfdFlags::empty()).unwrap();
        let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit)).unwrap();
        let at = now();
        if ended == 0 {
            let lines: Vec<String> = rank.lines.try_iter().collect();
            panic!("rank {number} hangs after {:?} {lines:?}", rank.read);
        }
        let status = rank.process.wait().unwrap();
        let mut lines = std::mem::take(&mut rank.read);
        lines.extend(rank.lines.iter());
        let stderr = self.stderr.recv_timeout(LIMIT).unwrap();
        Ending::new(number, at, (status.code(), status.signal()), &lines, stderr)
    }
}

/// Runs the cases, `at_once` at a time.
pub(crate) fn in_parallel<C: Sync>(at_once: usize, cases: &[C], run: impl Fn(&C) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    run(case);
                }
            });
        }
    });
}
