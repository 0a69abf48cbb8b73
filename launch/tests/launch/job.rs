//! A launcher with its ranks, as seen from outside.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionread;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use tempfile::TempDir;

/// Variables that reach launcher and ranks.
pub(crate) const ROLE: &str = "LAUNCH_TEST_ROLE";
pub(crate) const RANKS: &str = "LAUNCH_TEST_RANKS";
/// Name of a copy of this program.
const COPY: &str = "copy";
const ID: &str = "LAUNCH_TEST_ID";

/// A test that takes longer than this has failed; nothing takes nearly as long.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Job {
    launcher: Child,
    lines: Option<Receiver<String>>,
    /// The launcher's standard error, line by line.
    stderr: Receiver<String>,
    /// What was read of it.
    said: String,
    id: String,
    /// Folder of its program, if that is a copy.
    folder: Option<TempDir>,
}

/// Exit status and output of a launcher.
pub(crate) struct Finished {
    pub(crate) status: ExitStatus,
    /// Lines of standard output that were not read before.
    pub(crate) stdout: Vec<String>,
    pub(crate) stderr: String,
}

impl Finished {
    /// Returns the result of `spawn`, as the launcher has written it.
    pub(crate) fn outcome(&self) -> &str {
        let at = self.stderr.find("OUTCOME ").unwrap_or_else(|| panic!("no outcome in {}", self.stderr));
        self.stderr[at + "OUTCOME ".len()..].trim_end()
    }
}

impl Job {
    /// Starts a launcher whose ranks play this role.
    pub(crate) fn start(role: &str, ranks: usize) -> Self {
        Self::start_unread(role, ranks).read()
    }

    /// Like `start`, with a copy of this program that may be removed.
    pub(crate) fn start_copy(role: &str, ranks: usize) -> Self {
        let this = std::env::current_exe().unwrap();
        // A hard link in the same folder: a file that was just written cannot be executed while another test starts a
        // process.
        let folder = tempfile::tempdir_in(this.parent().unwrap()).unwrap();
        let program = folder.path().join(COPY);
        std::fs::hard_link(this, &program).unwrap();
        let mut job = Self::start_program(&program, role, ranks).read();
        job.folder = Some(folder);
        job
    }

    /// Removes the copy; the program keeps running.
    pub(crate) fn remove_copy(&self) {
        std::fs::remove_file(self.copy()).unwrap();
    }

    /// Creates the copy again.
    pub(crate) fn put_back_copy(&self) {
        std::fs::hard_link(std::env::current_exe().unwrap(), self.copy()).unwrap();
    }

    fn copy(&self) -> PathBuf {
        self.folder.as_ref().unwrap().path().join(COPY)
    }

    /// Waits until the launcher has written these words to standard error.
    pub(crate) fn wait_until_it_says(&mut self, words: &str) {
        let start = Instant::now();
        while !self.said.contains(words) {
            let left = LIMIT.checked_sub(start.elapsed()).unwrap();
            self.said += &self.stderr.recv_timeout(left).unwrap_or_else(|_| panic!("only: {}", self.said));
        }
    }

    /// Like `start`, but the launcher's standard output is not read.
    pub(crate) fn start_unread(role: &str, ranks: usize) -> Self {
        Self::start_program(&std::env::current_exe().unwrap(), role, ranks)
    }

    fn start_program(program: &Path, role: &str, ranks: usize) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let id = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut launcher = Command::new(program)
            .args(["roles::process", "--exact", "--nocapture", "--quiet"])
            .envs([(ROLE, role), (RANKS, &ranks.to_string()), (ID, &id)])
            .env_remove("RAYON_NUM_THREADS")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (sender, stderr) = channel();
        let mut pipe = BufReader::new(launcher.stderr.take().unwrap());
        std::thread::spawn(move || {
            let mut line = Vec::new();
            while pipe.read_until(b'\n', &mut line).unwrap() > 0 {
                let text = String::from_utf8_lossy(&line).into_owned();
                line.clear();
                // The pipe must be read even if the receiver is gone.
                let _ = sender.send(text);
            }
        });
        Self { launcher, lines: None, stderr, said: String::new(), id, folder: None }
    }

    /// Reads the launcher's standard output from now on.
    pub(crate) fn read(mut self) -> Self {
        let (sender, lines) = channel();
        let stdout = BufReader::new(self.launcher.stdout.take().unwrap());
        std::thread::spawn(move || {
            // Ends, and closes the pipe, when the test drops the receiver.
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        self.lines = Some(lines);
        self
    }

    /// Waits until a standard output that is not read is full.
    pub(crate) fn wait_until_full(&self) {
        let pipe = self.launcher.stdout.as_ref().unwrap();
        let start = Instant::now();
        // Full for lines: 15 of its 16 pages, except for gaps where the next line did not fit, and one more line.
        while ioctl_fionread(pipe).unwrap() < 14 * 4096 {
            assert!(start.elapsed() < LIMIT, "nothing is written");
            std::thread::yield_now();
        }
    }

    /// Returns the next line that the ranks have written.
    pub(crate) fn line(&self) -> String {
        self.lines.as_ref().unwrap().recv_timeout(LIMIT).expect("another line")
    }

    /// Reads until each rank has written `ready PID`; returns the ids by rank.
    pub(crate) fn ready(&self, ranks: usize) -> Vec<Pid> {
        let mut pids = vec![None; ranks];
        while pids.iter().any(Option::is_none) {
            let (rank, pid) = self.next_ready();
            pids[rank] = Some(pid);
        }
        pids.into_iter().flatten().collect()
    }

    /// Waits until this rank is ready, and returns its process; it is the next one that will be.
    pub(crate) fn ready_rank(&self, rank: usize) -> Pid {
        let (next, pid) = self.next_ready();
        assert_eq!(next, rank);
        pid
    }

    /// Waits for the next rank that is ready.
    fn next_ready(&self) -> (usize, Pid) {
        loop {
            let line = self.line();
            let words: Vec<&str> = line.split(' ').collect();
            if let ["rank", rank, "ready", pid] = words[..] {
                return (rank.parse().unwrap(), Pid::from_raw(pid.parse().unwrap()).unwrap());
            }
        }
    }

    /// Closes the reading end of the launcher's standard output.
    pub(crate) fn stop_reading(&mut self) {
        self.lines = None;
    }

    /// Sends a signal to the launcher.
    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.launcher), signal).unwrap();
    }

    /// Waits for the launcher to end.
    pub(crate) fn finish(mut self) -> Finished {
        let launcher = pidfd_open(Pid::from_child(&self.launcher), PidfdFlags::empty()).unwrap();
        let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&launcher, PollFlags::IN)], Some(&limit)).unwrap();
        assert_eq!(ended, 1, "the launcher hangs");
        let status = self.launcher.wait().unwrap();
        let stdout = self.lines.take().map(|lines| lines.iter().collect()).unwrap_or_default();
        let limit = Instant::now() + LIMIT;
        loop {
            match self.stderr.recv_timeout(limit.saturating_duration_since(Instant::now())) {
                Ok(line) => self.said += &line,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("standard error stays open; so far: {}", self.said),
            }
        }
        Finished { status, stdout, stderr: std::mem::take(&mut self.said) }
    }

    /// Kills the launcher with SIGKILL, then waits until none of its processes is left, at most 2 s.
    pub(crate) fn kill_and_expect_no_orphan(mut self) {
        self.launcher.kill().unwrap();
        let killed = Instant::now();
        assert_eq!(self.launcher.wait().unwrap().signal(), Some(9));
        loop {
            let left = self.processes();
            if left.is_empty() {
                return;
            }
            assert!(killed.elapsed() < Duration::from_secs(2), "left: {left:?}");
            std::thread::yield_now();
        }
    }

    /// Returns the running processes of this job, found by their environment.
    pub(crate) fn processes(&self) -> Vec<Pid> {
        let mark = format!("{ID}={}", self.id);
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
        // The environment of a process that has ended cannot be read.
        let ours = |pid: &i32| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|&byte| byte == 0).any(|variable| variable == mark.as_bytes())
        };
        pids.filter(ours).filter_map(Pid::from_raw).collect()
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Needed if a test fails: ranks end with their launcher. After `finish` there is nothing to kill.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

/// Whether this process ignores a signal, as under `nohup`: then the launcher leaves it ignored, too.
pub(crate) fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}
