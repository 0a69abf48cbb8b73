//! Worker failures: how a process started by a launcher ended, and which one failed first.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitStatus;

use serde::{Deserialize, Serialize, Serializer};

/// Exit code of a worker that was asked to stop, has written a checkpoint, and goes on from it when it is started again (the
/// `checkpoint_exit_code` in HTCondor's manual). A launcher does not take it for a failure: it does not restart the job, and
/// ends with this code itself.
pub const EXIT_CHECKPOINTED: i32 = 85;

/// Lines of standard error repeated in the message. All of them have been forwarded before.
const LINES_SHOWN: usize = 5;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitKind {
    /// It exited with this code.
    Code(i32),
    /// It was killed by the signal of this number.
    Signal(i32),
}

impl ExitKind {
    /// Returns whether it exited with code 0.
    pub fn success(self) -> bool {
        self == ExitKind::Code(0)
    }
}

impl From<ExitStatus> for ExitKind {
    fn from(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt;
        match status.code() {
            Some(code) => ExitKind::Code(code),
            None => ExitKind::Signal(status.signal().unwrap_or_default()),
        }
    }
}

impl fmt::Display for ExitKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExitKind::Code(code) => write!(f, "exited with code {code}"),
            ExitKind::Signal(number) => match signal_hook::low_level::signal_name(*number) {
                Some(name) => write!(f, "was killed by signal {name}"),
                None => write!(f, "was killed by signal {number}"),
            },
        }
    }
}

/// Returns the name of a signal, like `SIGINT`, or `signal 99` if it has none.
pub fn signal_name(number: i32) -> String {
    signal_hook::low_level::signal_name(number).map_or_else(|| format!("signal {number}"), str::to_string)
}

/// The first rank of a job whose process failed by its own fault.
///
/// ```
/// use launch::{ExitKind, WorkerFailure};
///
/// let failure = WorkerFailure {
///     rank: 1,
///     pid: 123,
///     status: ExitKind::Signal(9),
///     stderr_tail: vec!["[step 7] loss 0.3".into()],
///     also_failed: 0,
///     node: None,
///     log: None,
/// };
/// assert_eq!(
///     failure.to_string(),
///     "rank 1 (pid 123) was killed by signal SIGKILL\n  its last lines on stderr:\n    [step 7] loss 0.3"
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerFailure {
    /// Its rank.
    pub rank: usize,
    /// Its process id.
    pub pid: u32,
    /// How it ended.
    pub status: ExitKind,
    /// The last lines of its standard error, 20 at most, oldest first. The message shows the last 5.
    pub stderr_tail: Vec<String>,
    /// How many other ranks failed too, not counting those that the launcher killed.
    pub also_failed: usize,
    /// The node that it ran on, if the job has several.
    pub node: Option<NodeName>,
    /// The file that has all of its standard error, if there is one. Sent to other nodes as text, with invalid UTF-8
    /// replaced.
    #[serde(serialize_with = "as_text")]
    pub log: Option<PathBuf>,
}

fn as_text<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// One of the nodes of a job, that is, of its launchers. Usually there is one per machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeName {
    /// Its number, from 0.
    pub node: usize,
    /// Its host name.
    pub host: String,
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {} (host {})", self.node, self.host)
    }
}

impl WorkerFailure {
    /// Returns the first line of the message: which rank, and how it ended.
    pub fn headline(&self) -> String {
        let Self { rank, pid, status, .. } = self;
        match &self.node {
            Some(NodeName { node, host }) => {
                format!("rank {rank} (pid {pid}, node {node}, host {host}) {status}")
            }
            None => format!("rank {rank} (pid {pid}) {status}"),
        }
    }

    /// Returns a line about the number of other ranks that failed too, if there are any.
    pub fn others(&self) -> Option<String> {
        match self.also_failed {
            0 => None,
            1 => Some("1 other rank failed after it".into()),
            others => Some(format!("{others} other ranks failed after it")),
        }
    }
}

impl fmt::Display for WorkerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.headline())?;
        let shown = &self.stderr_tail[self.stderr_tail.len().saturating_sub(LINES_SHOWN)..];
        if !shown.is_empty() {
            write!(f, "\n  its last lines on stderr:")?;
        }
        for line in shown {
            write!(f, "\n    {line}")?;
        }
        if let Some(log) = &self.log {
            write!(f, "\n  all of them: {}", log.display())?;
        }
        self.others().map_or(Ok(()), |others| write!(f, "\n  {others}"))
    }
}

impl std::error::Error for WorkerFailure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_told_to_other_nodes_whatever_it_is_called() {
        use std::ffi::OsString;
        use std::os::unix::ffi::OsStringExt;
        let status = ExitKind::Code(7);
        let log = Some(OsString::from_vec(b"/l\xff/stderr.log".into()).into());
        let failure =
            WorkerFailure { rank: 1, pid: 9, status, stderr_tail: vec![], also_failed: 0, node: None, log };
        let told: WorkerFailure = serde_json::from_str(&serde_json::to_string(&failure).unwrap()).unwrap();
        assert_eq!(told, WorkerFailure { log: Some("/l\u{fffd}/stderr.log".into()), ..failure });
    }

    #[test]
    fn the_message_has_the_last_five_lines() {
        let tail = (0..20).map(|i| format!("line {i}")).collect();
        let status = ExitKind::Code(3);
        let failure = WorkerFailure {
            rank: 1,
            pid: 9,
            status,
            stderr_tail: tail,
            also_failed: 2,
            node: None,
            log: None,
        };
        let mut expected =
            vec!["rank 1 (pid 9) exited with code 3".to_owned(), "  its last lines on stderr:".into()];
        expected.extend((15..20).map(|i| format!("    line {i}")));
        expected.push("  2 other ranks failed after it".into());
        assert_eq!(failure.to_string(), expected.join("\n"));
    }
}
