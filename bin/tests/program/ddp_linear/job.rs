//! A long run that a test observes and disturbs.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::Folder;
use crate::ddp_linear::LINEAR;

/// Longer than anything that is waited for, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The running command, and a folder for its files. Remaining processes are killed on drop.
pub(crate) struct Job {
    child: Child,
    pub(crate) folder: Folder,
    ranks: Vec<Process>,
}

/// A process, identified by its start time as well, as process ids are reused.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    started: String,
}

impl Job {
    /// Starts a short single-process part and a long part with three ranks; returns once the ranks train.
    pub(crate) fn training(more: &[&str]) -> Self {
        let mut job = Self::start(more);
        // The single-process part has as many steps, but shorter ones.
        let metrics = job.folder.path("metrics.jsonl");
        job.until("the ranks train", || {
            std::fs::read_to_string(&metrics).is_ok_and(|text| text.contains(r#""run":"ddp""#))
        });
        job.ranks = job.children();
        assert_eq!(job.ranks.len(), 3);
        job
    }

    /// Starts the run and returns at once.
    pub(crate) fn start(more: &[&str]) -> Self {
        let folder = Folder::new();
        let file = |name: &str| Stdio::from(File::create(folder.path(name)).unwrap());
        let mut command = LINEAR.command();
        command.args(["--world-size", "3", "--epochs", "15000", "--samples", "64", "--batch-size", "64"]);
        command.args(["--metrics", &folder.argument("metrics.jsonl")]).args(more);
        command.stdout(file("stdout")).stderr(file("stderr")).process_group(0);
        Self { child: command.spawn().unwrap(), folder, ranks: Vec::new() }
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path(name)).unwrap()
    }

    pub(crate) fn launcher(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn rank(&self, rank: usize) -> Pid {
        self.ranks[rank].pid
    }

    pub(crate) fn send(&self, pid: Pid, signal: Signal) {
        kill_process(pid, signal).unwrap();
    }

    /// Waits for the end of the command; returns its status, and how long the wait took.
    pub(crate) fn end(&mut self) -> (ExitStatus, Duration) {
        let began = Instant::now();
        while began.elapsed() < LIMIT {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, began.elapsed());
            }
            pause();
        }
        panic!("the command does not end:\n{}", self.read("stderr"));
    }

    /// Waits until no rank is left; returns how long that took.
    pub(crate) fn ranks_are_gone(&self) -> Duration {
        let began = Instant::now();
        while self.ranks.iter().any(Process::runs) {
            assert!(began.elapsed() < LIMIT, "{:?} still run", self.ranks);
            pause();
        }
        began.elapsed()
    }

    fn until(&mut self, what: &str, done: impl Fn() -> bool) {
        let began = Instant::now();
        while !done() {
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "ended before {what}: {ended:?}\n{}", self.read("stderr"));
            assert!(began.elapsed() < LIMIT, "{what}: not yet\n{}", self.read("stderr"));
            pause();
        }
    }

    /// Returns the launcher's children, by rank.
    fn children(&self) -> Vec<Process> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap() {
            let Ok(number) = entry.unwrap().file_name().to_string_lossy().parse() else { continue };
            let Some(fields) = stat(number) else { continue };
            if fields[1] == self.child.id().to_string() {
                let environment = std::fs::read(format!("/proc/{number}/environ")).unwrap();
                let rank = environment.split(|byte| *byte == 0).find_map(|line| line.strip_prefix(b"RANK="));
                let rank: usize = String::from_utf8_lossy(rank.unwrap()).parse().unwrap();
                let pid = Pid::from_raw(number).unwrap();
                found.push((rank, Process { pid, started: fields[19].clone() }));
            }
        }
        found.sort_by_key(|(rank, _)| *rank);
        found.into_iter().map(|(_, process)| process).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in self.ranks.iter().filter(|process| process.runs()) {
            let _ = kill_process(process.pid, Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Process {
    fn runs(&self) -> bool {
        // A zombie that waits to be reaped by its new parent does not count.
        stat(self.pid.as_raw_pid())
            .is_some_and(|fields| fields[19] == self.started && !"ZX".contains(&fields[0]))
    }
}

/// Returns the fields of `/proc/PID/stat` from the third on, which is the state.
fn stat(pid: i32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(") ")?;
    Some(rest.split(' ').map(str::to_string).collect())
}

/// Sleeps between two polls.
fn pause() {
    std::thread::sleep(Duration::from_millis(2));
}
