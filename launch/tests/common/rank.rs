//! Starts a rank as another process of this test binary; it begins in the test `worker::process`.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// A test that takes longer than this has failed; nothing takes nearly as long.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// Variable with the id of the process that has started the rank.
const PARENT: &str = "RANK_TEST_PARENT";

/// Returns a command for a process of this test binary that begins in `worker::process`.
pub(crate) fn itself() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["worker::process", "--exact", "--nocapture", "--quiet", "--test-threads=1"])
        .env(PARENT, std::process::id().to_string());
    command
}

/// Returns a command for a rank of a group whose rendezvous file is in this folder.
pub(crate) fn member((rank, world_size): (usize, usize), folder: &Path, timeout: Duration) -> Command {
    let mut command = itself();
    command
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", world_size.to_string())
        .env("GIRANDOLE_INIT_METHOD", format!("file://{}", folder.join("meeting").display()))
        .env("GIRANDOLE_TIMEOUT", timeout.as_secs_f64().to_string())
        .env("GIRANDOLE_SECRET", "7b".repeat(32))
        .env_remove("GIRANDOLE_SECRET_FILE")
        .env("TMPDIR", folder);
    command
}

/// Makes the kernel kill this process when its parent ends. Called first by a process from [`itself`]; returns false in
/// the test's own process.
pub(crate) fn ends_with_its_parent() -> bool {
    let Ok(parent) = std::env::var(PARENT) else { return false };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    assert_eq!(getppid().map(Pid::as_raw_nonzero).map(i32::from), Some(parent.parse().unwrap()));
    true
}

/// A rank's process, killed when dropped.
pub(crate) struct Rank {
    pub(crate) process: Child,
    pub(crate) stdin: ChildStdin,
    pub(crate) lines: Receiver<String>,
    /// Lines that were read so far.
    pub(crate) read: Vec<String>,
}

impl Rank {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (sender, lines) = channel();
        let stdout = BufReader::new(process.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let stdin = process.stdin.take().unwrap();
        Self { process, stdin, lines, read: Vec::new() }
    }

    /// Reads up to a line with this beginning; returns whether there was one within the limit.
    pub(crate) fn reads(&mut self, beginning: &str) -> bool {
        while let Ok(line) = self.lines.recv_timeout(LIMIT) {
            self.read.push(line);
            if self.read.last().is_some_and(|line| line.starts_with(beginning)) {
                return true;
            }
        }
        false
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // After a wait there is nothing to kill.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
