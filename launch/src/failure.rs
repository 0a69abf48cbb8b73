//! How a rank ended, and which rank is the first cause of a failed job.

use std::time::{Duration, Instant};

use comm::EXIT_PEER_FAILED;
use signal_hook::consts::{SIGKILL, SIGTERM};

use crate::{EXIT_CHECKPOINTED, ExitKind};

/// When a process dies, its connections close a little before its end can be observed, and a peer may fail and end
/// first because of it. SIGKILL comes from outside, never from a peer's death: it takes precedence for this long.
pub(super) const KILL_PRECEDENCE: Duration = Duration::from_millis(500);

/// How one rank ended.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) rank: usize,
    pub(super) status: ExitKind,
    /// Whether the launcher had told it to end before.
    pub(super) asked_to_end: bool,
    /// When the launcher observed it.
    pub(super) at: Instant,
}

impl Ended {
    /// Whether it has stopped with a checkpoint, as it was asked to.
    pub(super) fn is_checkpointed(&self) -> bool {
        self.status == ExitKind::Code(EXIT_CHECKPOINTED)
    }

    /// Whether the rank failed by itself. A rank that was told to end may do so with any exit code, but not crash.
    fn failed(&self) -> bool {
        match self.status {
            _ if self.is_checkpointed() => false,
            ExitKind::Code(_) => !self.asked_to_end && !self.status.success(),
            ExitKind::Signal(SIGTERM | SIGKILL) => !self.asked_to_end,
            ExitKind::Signal(_) => true,
        }
    }

    /// Whether this signal has ended it.
    pub(super) fn is_of(&self, signal: i32) -> bool {
        self.status == ExitKind::Signal(signal) || self.status == ExitKind::Code(128 + signal)
    }

    /// Whether the failure may be a mere effect of `signal` on that rank, or on its peers.
    fn explained_by(&self, signal: i32) -> bool {
        self.asked_to_end || self.is_of(signal) || self.status == ExitKind::Code(EXIT_PEER_FAILED)
    }
}

/// Returns the rank that is the first cause, and how many others failed. `ended` is in chronological order; `signal` is
/// the signal that stopped the job, if any. The first cause is the earliest failure that is not attributed to another
/// rank, see also [`KILL_PRECEDENCE`].
pub(super) fn first_cause(ended: &[Ended], signal: Option<i32>) -> Option<(Ended, usize)> {
    let failed: Vec<Ended> = ended.iter().copied().filter(Ended::failed).collect();
    let own = failed.iter().find(|end| end.status != ExitKind::Code(EXIT_PEER_FAILED));
    let earliest = *own.or(failed.first())?;
    let killed =
        |end: &&Ended| end.status == ExitKind::Signal(SIGKILL) && end.at < earliest.at + KILL_PRECEDENCE;
    let cause = failed.iter().find(killed).copied().unwrap_or(earliest);
    let excused = signal.is_some_and(|signal| cause.explained_by(signal));
    (!excused).then_some((cause, failed.len() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, status: ExitKind) -> Ended {
        Ended { rank, status, asked_to_end: false, at: Instant::now() }
    }

    fn asked_to_end(rank: usize, status: ExitKind) -> Ended {
        Ended { asked_to_end: true, ..end(rank, status) }
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
        assert_eq!(blamed(&[end(1, Code(EXIT_CHECKPOINTED)), end(0, Code(EXIT_CHECKPOINTED))], None), None);
        assert_eq!(blamed(&[end(1, Code(EXIT_CHECKPOINTED)), end(0, Code(3))], None), Some((0, 0)));
    }

    #[test]
    fn a_rank_that_is_killed_from_outside_comes_first_where_times_are_close() {
        use ExitKind::{Code, Signal};
        let (panicked, killed) = (end(0, Code(101)), end(1, Signal(9)));
        assert_eq!(blamed(&[panicked, killed], None), Some((1, 1)));
        assert_eq!(
            blamed(&[panicked, Ended { at: panicked.at + KILL_PRECEDENCE, ..killed }], None),
            Some((0, 1))
        );
    }

    #[test]
    fn a_rank_that_the_launcher_ended_is_not_the_cause() {
        use ExitKind::{Code, Signal};
        let others = [asked_to_end(1, Signal(15)), asked_to_end(2, Signal(9)), asked_to_end(3, Code(1))];
        assert_eq!(blamed(&[&[end(0, Code(75))], &others[..]].concat(), None), Some((0, 0)));
        // ... unless it crashed in a way that no launcher causes.
        assert_eq!(blamed(&[end(0, Code(75)), asked_to_end(1, Signal(11))], None), Some((1, 1)));
    }

    #[test]
    fn what_a_signal_to_the_job_explains_is_no_failure() {
        use ExitKind::{Code, Signal};
        assert_eq!(blamed(&[end(0, Signal(2)), asked_to_end(1, Signal(2))], Some(2)), None);
        assert_eq!(blamed(&[end(0, Code(130)), end(1, Code(75))], Some(2)), None);
        assert_eq!(blamed(&[end(0, Code(3)), asked_to_end(1, Signal(2))], Some(2)), Some((0, 1)));
    }
}
