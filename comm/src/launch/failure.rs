//! How a rank ended, and which one is to blame.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize, Serializer};
use signal_hook::consts::{SIGKILL, SIGTERM};

use super::EXIT_PEER_FAILED;

/// Lines of standard error that are repeated in the message; they have been forwarded before.
const LINES_SHOWN: usize = 5;
/// A dying process's connections are closed a little before its end can be seen, and a peer may be quicker to end
/// because of them. SIGKILL comes from outside, never from a peer's death: it takes precedence for this long.
pub(super) const CLOSE: Duration = Duration::from_millis(500);

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ExitKind {
    /// By itself, with this code.
    Code(i32),
    /// By the signal of this number.
    Signal(i32),
}

impl ExitKind {
    pub(super) fn success(self) -> bool {
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

/// `SIGINT`, or `signal 99` where it has no name.
pub(crate) fn signal_name(number: i32) -> String {
    signal_hook::low_level::signal_name(number).map_or_else(|| format!("signal {number}"), str::to_string)
}

/// A rank whose process failed, the first one of its job that did so by its own fault.
///
/// ```
/// use comm::launch::{ExitKind, WorkerFailure};
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
    /// How many other ranks failed too, those not counted that the launcher ended.
    pub also_failed: usize,
    /// The node that it ran on, where the job has several.
    pub node: Option<NodeName>,
    /// The file that has all of its standard error, where there is one. Other nodes are told a name that is not UTF-8 as far as
    /// it is.
    #[serde(serialize_with = "as_text")]
    pub log: Option<PathBuf>,
}

fn as_text<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.to_string_lossy()).serialize(serializer)
}

/// One of the machines of a job, or what takes the place of one: where one launcher runs.
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
    /// The message's first line: who, and how it ended.
    pub fn headline(&self) -> String {
        let Self { rank, pid, status, .. } = self;
        match &self.node {
            Some(NodeName { node, host }) => {
                format!("rank {rank} (pid {pid}, node {node}, host {host}) {status}")
            }
            None => format!("rank {rank} (pid {pid}) {status}"),
        }
    }

    /// How many other ranks failed too, where there are any.
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

/// The end of one rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) rank: usize,
    pub(super) status: ExitKind,
    /// The launcher had told it to end before.
    pub(super) told: bool,
    /// When the launcher learnt of it.
    pub(super) at: Instant,
}

impl Ended {
    /// A failure of its own. A rank that was told to end may do so with any code, but not crash.
    fn failed(&self) -> bool {
        match self.status {
            ExitKind::Code(_) => !self.told && !self.status.success(),
            ExitKind::Signal(SIGTERM | SIGKILL) => !self.told,
            ExitKind::Signal(_) => true,
        }
    }

    /// A failure that may well be nothing but the effect of `signal` on that rank, or on its peers.
    fn explained_by(&self, signal: i32) -> bool {
        self.told
            || self.status == ExitKind::Signal(signal)
            || self.status == ExitKind::Code(128 + signal)
            || self.status == ExitKind::Code(EXIT_PEER_FAILED)
    }
}

/// The rank to blame, and how many others failed. `ended` is in the order of time; `signal` is what stopped the job, if
/// it was stopped. The first cause is the earliest failure that is not put down to another rank, see also [`CLOSE`].
pub(super) fn first_cause(ended: &[Ended], signal: Option<i32>) -> Option<(Ended, usize)> {
    let failed: Vec<Ended> = ended.iter().copied().filter(Ended::failed).collect();
    let own = failed.iter().find(|end| end.status != ExitKind::Code(EXIT_PEER_FAILED));
    let earliest = *own.or(failed.first())?;
    let killed = |end: &&Ended| end.status == ExitKind::Signal(SIGKILL) && end.at < earliest.at + CLOSE;
    let cause = failed.iter().find(killed).copied().unwrap_or(earliest);
    let excused = signal.is_some_and(|signal| cause.explained_by(signal));
    (!excused).then_some((cause, failed.len() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, status: ExitKind) -> Ended {
        Ended { rank, status, told: false, at: Instant::now() }
    }

    fn told(rank: usize, status: ExitKind) -> Ended {
        Ended { told: true, ..end(rank, status) }
    }

    fn blamed(ended: &[Ended], signal: Option<i32>) -> Option<(usize, usize)> {
        first_cause(ended, signal).map(|(cause, others)| (cause.rank, others))
    }

    #[test]
    fn the_earliest_failure_that_is_not_put_down_to_a_peer_is_the_cause() {
        use ExitKind::{Code, Signal};
        assert_eq!(blamed(&[end(0, Code(0)), end(1, Code(0))], None), None);
        assert_eq!(blamed(&[end(2, Code(75)), end(0, Code(75)), end(1, Signal(9))], None), Some((1, 2)));
        assert_eq!(blamed(&[end(2, Code(0)), end(0, Code(75)), end(1, Code(75))], None), Some((0, 1)));
        assert_eq!(blamed(&[end(1, Code(3)), end(0, Signal(11))], None), Some((1, 1)));
    }

    #[test]
    fn a_rank_that_is_killed_from_outside_comes_first_where_times_are_close() {
        use ExitKind::{Code, Signal};
        let (panicked, killed) = (end(0, Code(101)), end(1, Signal(9)));
        assert_eq!(blamed(&[panicked, killed], None), Some((1, 1)));
        assert_eq!(blamed(&[panicked, Ended { at: panicked.at + CLOSE, ..killed }], None), Some((0, 1)));
    }

    #[test]
    fn a_rank_that_the_launcher_ended_is_not_the_cause() {
        use ExitKind::{Code, Signal};
        let others = [told(1, Signal(15)), told(2, Signal(9)), told(3, Code(1))];
        assert_eq!(blamed(&[&[end(0, Code(75))], &others[..]].concat(), None), Some((0, 0)));
        // ... unless it crashed in a way that no launcher causes.
        assert_eq!(blamed(&[end(0, Code(75)), told(1, Signal(11))], None), Some((1, 1)));
    }

    #[test]
    fn what_a_signal_to_the_job_explains_is_no_failure() {
        use ExitKind::{Code, Signal};
        assert_eq!(blamed(&[end(0, Signal(2)), told(1, Signal(2))], Some(2)), None);
        assert_eq!(blamed(&[end(0, Code(130)), end(1, Code(75))], Some(2)), None);
        assert_eq!(blamed(&[end(0, Code(3)), told(1, Signal(2))], Some(2)), Some((0, 1)));
    }

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
