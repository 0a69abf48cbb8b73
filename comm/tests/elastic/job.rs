//! A job of rank processes, as seen from the test.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::worker::PARENT;

/// After this long a test has failed; nothing takes nearly as long.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Job {
    dir: TempDir,
    world_size: usize,
    timeout: f64,
    pub(crate) ranks: BTreeMap<usize, Rank>,
}

pub(crate) struct Rank {
    process: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    read: Vec<String>,
}

/// How a rank has ended.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) lines: Vec<String>,
}

impl Job {
    pub(crate) fn start(world_size: usize, timeout: f64) -> Self {
        let mut job = Self { dir: tempfile::tempdir().unwrap(), world_size, timeout, ranks: BTreeMap::new() };
        (0..world_size).for_each(|rank| job.add(rank, false));
        job.wait_for_groups(&(0..world_size).collect::<Vec<_>>());
        job
    }

    /// Starts a rank that joins later.
    pub(crate) fn newcomer(&mut self, number: usize) {
        self.add(number, true);
    }

    fn add(&mut self, rank: usize, newcomer: bool) {
        let file = |name: &str| self.dir.path().join(name).display().to_string();
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["worker::process", "--exact", "--nocapture", "--quiet", "--test-threads=1"])
            .env(PARENT, std::process::id().to_string())
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", self.world_size.to_string())
            .env("GIRANDOLE_INIT_METHOD", format!("file://{}", file("meeting")))
            .env("GIRANDOLE_ELASTIC_FILE", file("group"))
            .env("GIRANDOLE_NEWCOMER", if newcomer { "1" } else { "0" })
            .env("GIRANDOLE_TIMEOUT", self.timeout.to_string())
            .env("GIRANDOLE_SECRET", "7b".repeat(32))
            .env("TMPDIR", self.dir.path())
            .env_remove("GIRANDOLE_SECRET_FILE")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let stdin = process.stdin.take().unwrap();
        self.ranks.insert(rank, Rank { process, stdin, lines, read: Vec::new() });
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[&rank].process), signal).unwrap();
    }

    /// Kills ranks; they count no more.
    pub(crate) fn kill(&mut self, ranks: &[usize]) {
        ranks.iter().for_each(|rank| self.signal(*rank, Signal::KILL));
        for rank in ranks {
            assert_eq!(self.ranks.remove(rank).unwrap().finish().signal, Some(9));
        }
    }

    /// Waits until a rank says that it is in this group.
    pub(crate) fn wait_for_group(&mut self, rank: usize, group: &[usize]) {
        let wanted = format!("@group {group:?} ");
        self.ranks.get_mut(&rank).unwrap().wait_for(&|line| line.starts_with(&wanted), &wanted);
    }

    pub(crate) fn wait_for_groups(&mut self, group: &[usize]) {
        let ranks: Vec<usize> = self.ranks.keys().copied().collect();
        ranks.into_iter().for_each(|rank| self.wait_for_group(rank, group));
    }

    pub(crate) fn finish_one(&mut self, rank: usize) -> Ending {
        self.ranks.remove(&rank).unwrap().finish()
    }

    /// Tells all that are left to end; they must have done the same, in this group.
    pub(crate) fn finish(mut self, group: &[usize]) {
        assert_eq!(self.ranks.keys().copied().collect::<Vec<_>>(), group);
        for rank in self.ranks.values_mut() {
            // It fails only where the rank has ended, which is told below.
            let _ = rank.stdin.write_all(b"go\n");
        }
        let endings: Vec<Ending> = std::mem::take(&mut self.ranks).into_values().map(Rank::finish).collect();
        let done = |ending: &Ending| ending.lines.iter().find(|line| line.starts_with("@done ")).cloned();
        let first = done(&endings[0]).unwrap_or_else(|| panic!("{endings:?}"));
        assert!(first.ends_with(&format!("{group:?}")), "{first}, not {group:?}");
        for ending in &endings {
            assert_eq!((ending.code, done(ending).as_ref()), (Some(0), Some(&first)), "{endings:?}");
        }
        let left: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().flatten().collect();
        assert!(left.is_empty(), "files are left: {left:?}");
    }
}

impl Rank {
    fn wait_for(&mut self, wanted: &dyn Fn(&str) -> bool, name: &str) {
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("no {name} after {:?}", self.read));
            self.read.push(line);
            if self.read.last().is_some_and(|line| wanted(line)) {
                return;
            }
        }
    }

    fn finish(mut self) -> Ending {
        let mut lines = std::mem::take(&mut self.read);
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => lines.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(_) => panic!("it hangs after {lines:?}"),
            }
        }
        let status = self.process.wait().unwrap();
        Ending { code: status.code(), signal: status.signal(), lines }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // After `finish` there is nothing to end.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
