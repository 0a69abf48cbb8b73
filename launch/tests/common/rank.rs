//! A rank that is this test binary, started anew: it begins in the test `worker::process`.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// After this long a test has failed; nothing takes nearly as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
/// The process that has started it.
const PARENT: &str = "RANK_TEST_PARENT";

/// A process that begins in `worker::process`.
pub(crate) fn itself() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["worker::process", "--exact", "--nocapture", "--quiet", "--test-threads=1"])
        .env(PARENT, std::process::id().to_string());
    command
}

/// One that is a rank of a group, which meets in this folder.
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

/// For [`itself`] to call first; false where this process is the test.
pub(crate) fn ends_with_its_parent() -> bool {
    let Ok(parent) = std::env::var(PARENT) else { return false };
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    assert_eq!(getppid().map(Pid::as_raw_nonzero).map(i32::from), Some(parent.parse().unwrap()));
    true
}

/// Killed when dropped.
pub(crate) struct Rank {
    pub(crate) process: Child,
    pub(crate) stdin: ChildStdin,
    pub(crate) lines: Receiver<String>,
    /// What was read while something else was looked for.
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

    pub(crate) fn wait_for(&mut self, beginning: &str) {
        loop {
            let line = self.lines.recv_timeout(PATIENCE);
            let line = line.unwrap_or_else(|_| panic!("no {beginning} after {:?}", self.read));
            self.read.push(line);
            if self.read.last().is_some_and(|line| line.starts_with(beginning)) {
                return;
            }
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Where it has been waited for, there is nothing to end.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
