//! Waiting for a peer: spins shortly, then sleeps, queries the other ranks, warns, and fails at the time-out.
//!
//! The time-out applies to the whole operation, not to one wait in it. An operation that moves much data may take
//! longer, as long as it is fast enough: [`Timeouts`] counts how far the operation is behind, a duration that grows
//! with time and shrinks with every byte, at [`MIN_BYTES_PER_SECOND`]. So a peer that sends a byte now and then times out like one that
//! sends nothing.

mod yields;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::base::cause::Cause;
use crate::base::fingerprint::Fingerprint;
use crate::failure::diagnosis::Question;
use crate::failure::shutdown::ShutdownFlag;
use crate::failure::supervisor::Supervisor;
use crate::transport::links::{Links, Wait};
use crate::{Error, Result};

use yields::Yields;

/// After this long without a byte, the other ranks are asked for the first time whether they are in another call.
const FIRST_QUESTION: Duration = Duration::from_secs(1);
/// After this long, a wait is reported to the supervisor. Most waits are shorter and skip that cost.
const REPORT_WAIT_AFTER: Duration = Duration::from_millis(20);
/// This long before the time-out, the other ranks are asked once more, so that it is known by the time-out which do not
/// answer.
const LAST_QUERY_BEFORE: Duration = Duration::from_millis(1500);
/// Bytes a second, sent and received together, at which an operation does not fall behind.
const MIN_BYTES_PER_SECOND: u64 = 1 << 20;
/// The longest sleep, and so the longest delay until the end of the communicator is noticed.
const MAX_SLEEP: Duration = Duration::from_millis(500);
/// The most that counts as time between two checks: a sleep and a query. After a longer time this process itself has
/// stood still (SIGSTOP, a suspended job), which says nothing about the peer.
const MAX_BETWEEN_CHECKS: Duration = Duration::from_secs(2);

/// Timing state of one operation and of the current wait in it, and the steps (query, warning) taken so far.
pub(crate) struct Timeouts {
    ending: Arc<ShutdownFlag>,
    spins: u32,
    spun: u32,
    yields: Yields,
    /// When the wait began. `None` until the first call of [`Self::check_timeouts`] in it.
    since: Option<Instant>,
    next_question: Duration,
    /// How far the operation was behind at the last update, and the time of that update with the bytes moved by then.
    behind: Duration,
    looked: Option<(Instant, u64)>,
    rehearsed: bool,
    warned: bool,
    /// The ranks waited for have been reported to the supervisor.
    reported: bool,
}

impl Timeouts {
    pub(crate) fn new(ending: Arc<ShutdownFlag>) -> Self {
        Self {
            ending,
            spins: 0,
            spun: 0,
            yields: Yields::default(),
            since: None,
            next_question: FIRST_QUESTION,
            behind: Duration::ZERO,
            looked: None,
            rehearsed: false,
            warned: false,
            reported: false,
        }
    }

    pub(crate) fn ending(&self) -> &Arc<ShutdownFlag> {
        &self.ending
    }

    /// Begins an operation. `spins`: how often [`Self::wait`] returns at once, for another try, before it yields and
    /// sleeps.
    pub(crate) fn begin(&mut self, spins: u32) {
        (self.spins, self.looked, self.behind) = (spins, None, Duration::ZERO);
        (self.rehearsed, self.warned, self.reported) = (false, false, false);
        self.reset();
    }

    /// Begins a new wait, because data has moved.
    pub(crate) fn reset(&mut self) {
        (self.spun, self.since, self.next_question) = (0, None, FIRST_QUESTION);
        self.yields.reset();
    }

    /// Begins a new wait that is expected to be long: it skips spinning and yielding.
    pub(crate) fn reset_to_sleep(&mut self) {
        self.reset();
        self.spun = self.spins;
        self.yields.skip();
    }

    /// Waits once: spins, yields or sleeps until one of the links in `waits` is ready, for at most `longest`. `waits`
    /// is not empty; `moved` is the number of bytes that the operation has sent and received so far.
    pub(crate) fn wait(
        &mut self,
        links: &mut dyn Links,
        (waits, longest): (&[Wait], Duration),
        moved: u64,
        supervisor: &dyn Supervisor,
        call: &Fingerprint,
    ) -> Result<()> {
        if self.spun < self.spins {
            self.spun += 1;
            std::hint::spin_loop();
            return Ok(());
        }
        if self.yields.yield_once() {
            return Ok(());
        }
        let peer = waits.iter().find(|wait| wait.read).unwrap_or(&waits[0]).peer;
        let mut rest = self.check_timeouts(links, peer, moved, supervisor, call)?;
        if !self.reported {
            let waited = self.since.map_or(Duration::ZERO, |since| since.elapsed());
            self.reported = waited >= REPORT_WAIT_AFTER;
            match self.reported {
                true => supervisor.wait_for(waits),
                false => rest = rest.min(REPORT_WAIT_AFTER - waited),
            }
        }
        links.wait(waits, rest.min(longest));
        Ok(())
    }

    /// Queries the other ranks, warns or fails, where it is time to. Returns how long the caller may then wait for
    /// `peer` before it must call this again.
    pub(crate) fn check_timeouts(
        &mut self,
        links: &dyn Links,
        peer: usize,
        moved: u64,
        supervisor: &dyn Supervisor,
        call: &Fingerprint,
    ) -> Result<Duration> {
        if let Some(cause) = supervisor.failure() {
            return Err(supervisor.error(&cause, call.to_string()));
        }
        let now = Instant::now();
        let since = *self.since.get_or_insert(now);
        let (waited, behind) = (now - since, self.update_behind(now, moved));
        let timeout = supervisor.timeout();
        if self.ending.must_end(waited, timeout) {
            return Err(aborted(&self.ending, supervisor, call));
        }
        if behind >= timeout {
            let question = match links.last_error(peer) {
                Some(detail) => Question::Unreached { peer, detail },
                None => Question::Stuck { peer, last: true, apart: false },
            };
            return Err(failure_error(supervisor, question, call));
        }
        if !self.warned && behind >= supervisor.slow_warning() {
            self.warned = true;
            warn(supervisor, peer, call, behind);
        }
        let rehearsal = rehearsal(timeout);
        if waited >= self.next_question || !self.rehearsed && behind >= rehearsal {
            while self.next_question <= waited {
                self.next_question *= 2;
            }
            self.rehearsed |= behind >= rehearsal;
            let apart = links.last_error(peer).is_some();
            if let Some(cause) = supervisor.ask(Question::Stuck { peer, last: false, apart }) {
                return Err(supervisor.error(&cause, call.to_string()));
            }
        }
        // The query has taken time as well.
        let spent = now.elapsed();
        let left = |until: Duration, so_far: Duration| until.saturating_sub(so_far + spent);
        let mut rest = left(self.next_question, waited).min(left(timeout, behind)).min(MAX_SLEEP);
        if !self.rehearsed {
            rest = rest.min(left(rehearsal, behind));
        }
        if !self.warned {
            rest = rest.min(left(supervisor.slow_warning(), behind));
        }
        Ok(rest.max(Duration::from_millis(1)))
    }

    /// Updates and returns how far the operation is behind.
    fn update_behind(&mut self, now: Instant, moved: u64) -> Duration {
        let (at, by_then) = self.looked.replace((now, moved)).unwrap_or((now, moved));
        let bytes = moved.saturating_sub(by_then);
        let paid = Duration::from_secs(bytes / MIN_BYTES_PER_SECOND)
            + Duration::from_nanos(bytes % MIN_BYTES_PER_SECOND * 1_000_000_000 / MIN_BYTES_PER_SECOND);
        self.behind = (self.behind + (now - at).min(MAX_BETWEEN_CHECKS)).saturating_sub(paid);
        self.behind
    }
}

/// Returns the error of a call that ends because its communicator was closed or aborted.
fn aborted(ending: &ShutdownFlag, supervisor: &dyn Supervisor, call: &Fingerprint) -> Error {
    let operation = call.to_string() + &supervisor.members().suffix();
    if !ending.is_aborted() {
        tracing::warn!(
            "{operation} is aborted, because its communicator was dropped and nothing comes from the others: wait for its \
             `Work` before, or call `abort`"
        );
    }
    Error::Aborted { operation }
}

/// Returns how far behind an operation must be for the query before the last one. The last one is made at the time-out.
fn rehearsal(timeout: Duration) -> Duration {
    timeout.saturating_sub(LAST_QUERY_BEFORE).max(timeout / 4)
}

/// Returns the error of a call that cannot continue. If no cause is known, it is the rank that the question is about.
pub(crate) fn failure_error(supervisor: &dyn Supervisor, question: Question, call: &Fingerprint) -> Error {
    let known = supervisor.failure().or_else(|| supervisor.ask(question.clone()));
    let cause = known.unwrap_or_else(|| match question {
        Question::Lost { peer, .. } => Cause::Died { rank: peer },
        Question::Known { cause, .. } => cause,
        Question::Unreached { peer, .. } => Cause::Left { rank: peer },
        _ => Cause::Stalled { rank: question.peer(), detail: "nobody could say what it does".into() },
    });
    supervisor.error(&cause, call.to_string())
}

/// Returns the error of a call for which the communication library (NCCL, MPI) has failed on this rank, after reporting
/// it to all ranks. If another cause explains the failure, the error names that one.
pub(crate) fn library_error(
    supervisor: &dyn Supervisor,
    rank: usize,
    error: Error,
    call: &Fingerprint,
) -> Error {
    let question = Question::Failed { rank, detail: error.to_string() };
    let cause = supervisor.failure().or_else(|| supervisor.ask(question));
    match (cause, &error) {
        (Some(cause), Error::System { .. }) => supervisor.error(&cause, call.to_string()),
        _ => error,
    }
}

fn warn(supervisor: &dyn Supervisor, peer: usize, call: &Fingerprint, waited: Duration) {
    let members = supervisor.members();
    let (seconds, place) = (waited.as_secs(), members.suffix());
    let (rank, host, detail) = match supervisor.ask(Question::Suspect { peer }) {
        Some(cause @ Cause::Link { .. }) => {
            let stalled = supervisor.error(&cause, call.to_string());
            return tracing::warn!("{call}{place}: waiting for {seconds} s: {stalled}");
        }
        Some(Cause::Stalled { rank, detail }) => (members.world_rank(rank), supervisor.host(rank), detail),
        // About a rank outside this group.
        Some(Cause::InJob { cause, host }) => match *cause {
            Cause::Stalled { rank, detail } => (rank, host, detail),
            _ => (cause.rank().unwrap_or_default(), host, "its process is gone".into()),
        },
        _ => (members.world_rank(peer), supervisor.host(peer), "nobody could say what it does".into()),
    };
    tracing::warn!("{call}{place}: waiting for rank {rank} (host {host}) for {seconds} s: {detail}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_in_which_this_process_stood_still_does_not_count() {
        let mut timeouts = Timeouts::new(Arc::default());
        timeouts.begin(0);
        let mut now = Instant::now();
        timeouts.update_behind(now, 0);
        now += Duration::from_secs(3600);
        assert_eq!(timeouts.update_behind(now, 0), MAX_BETWEEN_CHECKS);
        // A rank that runs counts all the time in which nothing comes.
        for _ in 0..600 {
            now += MAX_SLEEP;
            timeouts.update_behind(now, 0);
        }
        assert_eq!(timeouts.behind, MAX_BETWEEN_CHECKS + Duration::from_secs(300));
        now += MAX_SLEEP;
        assert!(timeouts.update_behind(now, 1000 * MIN_BYTES_PER_SECOND).is_zero());
    }
}
