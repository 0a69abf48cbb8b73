//! A job of rank processes, as seen from the test.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::rank::{LIMIT, Rank, member};

pub(crate) struct Job {
    dir: TempDir,
    world_size: usize,
    timeout: f64,
    pub(crate) ranks: BTreeMap<usize, Rank>,
    /// Ids of the processes that were killed.
    killed: Vec<u32>,
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
        let mut job = Self {
            dir: tempfile::tempdir().unwrap(),
            world_size,
            timeout,
            ranks: BTreeMap::new(),
            killed: vec![],
        };
        (0..world_size).for_each(|rank| job.add(rank, false));
        job.wait_for_groups(&(0..world_size).collect::<Vec<_>>());
        job
    }

    /// Starts a rank that joins later.
    pub(crate) fn newcomer(&mut self, number: usize) {
        self.add(number, true);
    }

    /// Starts a rank with these variables that cannot join, and returns how it ends.
    pub(crate) fn misfit(&self, number: usize, variables: &[(&str, &str)]) -> Ending {
        finish(Rank::start(self.command(number, true).envs(variables.iter().copied())))
    }

    fn add(&mut self, rank: usize, newcomer: bool) {
        let started = Rank::start(&mut self.command(rank, newcomer));
        self.ranks.insert(rank, started);
    }

    fn command(&self, rank: usize, newcomer: bool) -> Command {
        let place = (rank, self.world_size);
        let mut command = member(place, self.dir.path(), Duration::from_secs_f64(self.timeout));
        command.env("GIRANDOLE_ELASTIC_FILE", self.dir.path().join("group"));
        command.env("GIRANDOLE_NEWCOMER", if newcomer { "1" } else { "0" });
        command
    }

    pub(crate) fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.ranks[&rank].process), signal).unwrap();
    }

    /// Kills ranks and removes them from the job.
    pub(crate) fn kill(&mut self, ranks: &[usize]) {
        ranks.iter().for_each(|rank| self.signal(*rank, Signal::KILL));
        for rank in ranks {
            let process = self.ranks.remove(rank).unwrap();
            self.killed.push(process.process.id());
            let ending = finish(process);
            assert_eq!(ending.signal, Some(9), "rank {rank}: {ending:?}");
        }
    }

    /// Waits until a rank reports that it is in this group.
    pub(crate) fn wait_for_group(&mut self, rank: usize, group: &[usize]) {
        let line = format!("@group {group:?} ");
        if !self.ranks.get_mut(&rank).unwrap().reads(&line) {
            let told = |(rank, process): (&usize, &mut Rank)| {
                process.read.extend(process.lines.try_iter());
                format!("rank {rank}: {:?}\n", process.read)
            };
            panic!("rank {rank}: no {line}\n{}", self.ranks.iter_mut().map(told).collect::<String>());
        }
    }

    pub(crate) fn wait_for_groups(&mut self, group: &[usize]) {
        let ranks: Vec<usize> = self.ranks.keys().copied().collect();
        ranks.into_iter().for_each(|rank| self.wait_for_group(rank, group));
    }

    pub(crate) fn finish_one(&mut self, rank: usize) -> Ending {
        finish(self.ranks.remove(&rank).unwrap())
    }

    /// Tells all remaining ranks to end. All must report the same state, and this group.
    pub(crate) fn finish(mut self, group: &[usize]) {
        assert_eq!(self.ranks.keys().copied().collect::<Vec<_>>(), group);
        for rank in self.ranks.values_mut() {
            // Fails only if the rank has ended, which is reported below.
            let _ = rank.stdin.write_all(b"go\n");
        }
        let endings: Vec<Ending> = std::mem::take(&mut self.ranks).into_values().map(finish).collect();
        let done = |ending: &Ending| ending.lines.iter().find(|line| line.starts_with("@done ")).cloned();
        let first = done(&endings[0]).unwrap_or_else(|| panic!("{endings:?}"));
        assert!(first.ends_with(&format!("{group:?}")), "{first}, not {group:?}");
        for ending in &endings {
            assert_eq!((ending.code, done(ending).as_ref()), (Some(0), Some(&first)), "{endings:?}");
        }
        let left: Vec<_> = std::fs::read_dir(self.dir.path()).unwrap().flatten().collect();
        // One that is killed while it writes the group's file cannot remove its draft, which has its process' id in its name.
        let is_draft = |name: &str| self.killed.iter().any(|id| name.starts_with(&format!("group.{id}-")));
        let left: Vec<_> = left.iter().map(|entry| entry.file_name()).collect();
        let all_drafts = left.iter().all(|name| is_draft(&name.to_string_lossy()));
        assert!(all_drafts, "files are left: {left:?}");
    }
}

fn finish(mut rank: Rank) -> Ending {
    let mut lines = std::mem::take(&mut rank.read);
    loop {
        match rank.lines.recv_timeout(LIMIT) {
            Ok(line) => lines.push(line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("it hangs after {lines:?}"),
        }
    }
    let status = rank.process.wait().unwrap();
    Ending { code: status.code(), signal: status.signal(), lines }
}
