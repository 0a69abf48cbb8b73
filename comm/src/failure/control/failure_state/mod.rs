//! Failure state of one rank in one group, shared by its control thread and the threads that run operations.

pub(crate) mod job;
mod other_groups;
mod supervision;

use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::TcpConfig;
use crate::base::cause::{Cause, NO_ANSWER};
use crate::base::last_message::{self, GOODBYE};
use crate::base::lock;
use crate::base::members::Members;
use crate::failure::control::failure_state::job::Job;
use crate::failure::diagnosis::{Activity, OtherGroupCall, Question, Status, choose_cause};
use crate::failure::supervisor::Supervisor;
use crate::transport::tcp::connections::DataConnections;

/// How long rank 0 waits for the ranks to report what they are doing.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_millis(400);
/// How long a rank waits for rank 0's answer, which may itself wait for other ranks' reports.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(900);
/// The same for questions after which rank 0 is taken to be the cause if it does not answer.
const LAST_TIMEOUT: Duration = Duration::from_millis(1500);
/// How long after a rank's death the control thread logs it, if no operation of the group has reported it.
const DEATH_LOG_DELAY: Duration = Duration::from_millis(500);
/// How long an operation on rank 0 waits for rank 0's own control thread: its delay says nothing about other ranks.
const OWN_TIMEOUT: Duration = Duration::from_secs(10);

/// Failure state of one rank in one group: its questions, their answers, and the cause of a failure.
#[derive(Debug)]
pub(crate) struct FailureState {
    rank: usize,
    members: Members,
    timeout: Duration,
    slow_warning: Duration,
    data_connections: Arc<DataConnections>,
    job: Arc<Job>,
    activity: Mutex<Activity>,
    reports: Mutex<FailureReports>,
    /// Signals a change of `reports`.
    changed: Condvar,
    failed: AtomicBool,
    /// An operation has read the failure.
    is_known: AtomicBool,
    /// Whether the death of a rank has been logged, which the program need not have seen.
    is_logged: AtomicBool,
    /// The failure was decided by this rank alone, since rank 0 has left: no rank 0 sends it to the others.
    alone: AtomicBool,
}

#[derive(Debug, Default)]
struct FailureReports {
    failure: Option<Cause>,
    failed_at: Option<Instant>,
    questions: Vec<(u64, Question)>,
    /// Questions whose answers an operation waits for.
    open: Vec<u64>,
    answers: Vec<(u64, Option<Cause>)>,
    next_id: u64,
    /// When the oldest question was asked since rank 0 last sent anything. `None` if there is none.
    silent_since: Option<Instant>,
    closing: Option<Closing>,
}

/// How the group is closed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Closing {
    pub(super) goodbye: bool,
}

impl FailureState {
    pub(crate) fn new(
        config: &TcpConfig,
        members: Members,
        data_connections: Arc<DataConnections>,
        job: Arc<Job>,
    ) -> Self {
        Self {
            rank: config.rank,
            members,
            timeout: config.bounded_timeout(),
            slow_warning: config.slow_warning,
            data_connections,
            job,
            activity: Mutex::default(),
            reports: Mutex::default(),
            changed: Condvar::new(),
            failed: AtomicBool::new(false),
            is_known: AtomicBool::new(false),
            is_logged: AtomicBool::new(false),
            alone: AtomicBool::new(false),
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The groups of this job in this process.
    pub(crate) fn job(&self) -> &Arc<Job> {
        &self.job
    }

    /// Number of collectives that have returned on this rank, successfully or not. One still in progress does not
    /// count.
    pub(super) fn progress(&self) -> u64 {
        let activity = lock(&self.activity);
        match activity.current() {
            Some(aborted) if !aborted.is_message() => aborted.sequence.saturating_sub(1),
            _ => activity.progress(),
        }
    }

    /// Asks the control thread to end, and to send a goodbye before if `goodbye` is set.
    pub(crate) fn close(&self, goodbye: bool) {
        lock(&self.reports).closing = Some(Closing { goodbye });
        self.changed.notify_all();
        if !goodbye {
            self.data_connections.shutdown(Shutdown::Both, None);
        }
        self.wake();
    }

    /// Notifies the peers, on the data connections, that this rank leaves, with the reason if its program has announced
    /// one, or another group of the job has failed.
    pub(crate) fn notify_leaving(&self) {
        let because = self
            .job
            .reason_to_leave()
            .map(|cause| Cause::InJob { cause: Box::new(cause), host: String::new() });
        self.data_connections
            .leave(because.as_ref().and_then(last_message::encode_failure).unwrap_or(GOODBYE));
    }

    pub(super) fn closing(&self) -> Option<Closing> {
        lock(&self.reports).closing
    }

    pub(super) fn take_questions(&self) -> Vec<(u64, Question)> {
        std::mem::take(&mut lock(&self.reports).questions)
    }

    /// Records that rank 0 has sent a message.
    pub(super) fn note_message_from_rank_0(&self) {
        lock(&self.reports).silent_since = None;
    }

    pub(super) fn answer(&self, id: u64, cause: Option<Cause>) {
        let mut reports = lock(&self.reports);
        reports.silent_since = None;
        if reports.open.contains(&id) {
            reports.answers.push((id, cause));
        }
        drop(reports);
        self.changed.notify_all();
    }

    /// Fails the group: all data connections are cut, so that no operation waits any longer. Returns false if it had
    /// failed before.
    pub(super) fn fail(&self, cause: Cause) -> bool {
        let failed = self.note(cause);
        if failed {
            self.data_connections.shutdown(Shutdown::Both, None);
        }
        failed
    }

    /// Whether the group has failed. For callers that are not operations: it does not mark the failure as known.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Whether the group has failed and no operation knows yet.
    pub(super) fn is_unreported(&self) -> bool {
        self.has_failed() && !self.is_known.load(Ordering::Acquire)
    }

    /// When to log the death of a rank, if no operation has reported it by then: the process may end before its next
    /// operation.
    pub(super) fn death_log_at(&self) -> Option<Instant> {
        let is_due = self.is_unreported() && !self.is_logged.load(Ordering::Acquire);
        let failed_at = is_due.then(|| lock(&self.reports).failed_at).flatten()?;
        Some(failed_at + DEATH_LOG_DELAY)
    }

    /// Logs the death, if it is time to. Only the group of all ranks does.
    pub(super) fn log_death(&self) {
        if self.death_log_at().is_none_or(|at| Instant::now() < at)
            || self.is_logged.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let is_world = self.job.world().is_some_and(|world| std::ptr::eq(&*world, self));
        let failure = lock(&self.reports).failure.clone();
        if let (true, Some(Cause::Died { rank })) = (is_world, failure) {
            tracing::warn!("{}", self.death_text(rank));
        }
    }

    /// Text of that log line, on a rank that is in no operation of the group.
    pub(super) fn death_text(&self, rank: usize) -> String {
        let [own, dead] = [self.rank, rank].map(|rank| self.members.world_rank(rank));
        let host = Supervisor::host(self, rank);
        match self.activity().elsewhere.first() {
            Some(OtherGroupCall { call, .. }) => {
                format!("rank {dead} (host {host}) has died, and rank {own} is still in {call}")
            }
            None => format!(
                "rank {own} has called nothing since rank {dead} (host {host}) died: its next operation fails"
            ),
        }
    }

    /// Fails the group on this rank alone, because rank 0 has left. The peers are notified by [`Supervisor::close_streams`].
    pub(super) fn fail_alone(&self, cause: Cause) {
        self.alone.store(true, Ordering::Release);
        let words = last_message::encode_failure(&cause);
        if self.note(cause) {
            // Wakes only this rank's operations; its peers still receive what it sends.
            self.data_connections.shutdown(Shutdown::Read, words);
        }
    }

    fn note(&self, cause: Cause) -> bool {
        let mut reports = lock(&self.reports);
        if reports.failure.is_some() {
            return false;
        }
        (reports.failure, reports.failed_at) = (Some(cause.clone()), Some(Instant::now()));
        self.failed.store(true, Ordering::Release);
        // Before an operation can report the failure to the program, which may then continue with other groups.
        self.note_in_job(&cause);
        self.job.end_meetings(self, false);
        drop(reports);
        self.changed.notify_all();
        true
    }

    /// Chooses a cause when rank 0 itself does not answer.
    fn without_an_answer(&self, question: Question) -> Option<Cause> {
        let silent = Cause::Stalled { rank: 0, detail: NO_ANSWER.into() };
        let cause = match question {
            Question::Suspect { .. } | Question::Elsewhere { lost: false, .. } => return Some(silent),
            Question::Stuck { last: false, .. } | Question::Elsewhere { .. } => return None,
            // A peer that is lost may have given up waiting for rank 0.
            Question::Stuck { .. }
            | Question::Lost { left: false, because: None, .. }
            | Question::Unreached { .. } => silent,
            Question::Lost { .. }
            | Question::Mismatch { .. }
            | Question::Garbage { .. }
            | Question::Known { .. }
            | Question::Failed { .. } => self.judge_alone(&question, Status::Silent).unwrap_or(silent),
        };
        self.fail(cause);
        self.failure()
    }

    /// Returns the cause as far as this rank can find it by itself, given the status of rank 0.
    pub(super) fn judge_alone(&self, question: &Question, center: Status) -> Option<Cause> {
        let status = |rank| match rank {
            0 => center.clone(),
            rank if rank == self.rank => Status::Active(self.activity()),
            _ => Status::Unknown,
        };
        choose_cause(
            self.rank,
            question,
            &(0..self.data_connections.peers().len()).map(status).collect::<Vec<_>>(),
        )
    }

    /// Asks this group only, not the group of all ranks.
    fn ask_here(&self, question: Question) -> Option<Cause> {
        let time_limit = match question {
            _ if self.rank == 0 => OWN_TIMEOUT,
            Question::Suspect { .. } | Question::Stuck { last: false, .. } => ANSWER_TIMEOUT,
            _ => LAST_TIMEOUT,
        };
        let mut reports = lock(&self.reports);
        if reports.closing.is_some() {
            // Errors that a rank sees while it closes the group are nobody's fault.
            return reports.failure.clone();
        }
        // The time that rank 0 has already been silent counts against the deadline.
        let deadline = *reports.silent_since.get_or_insert_with(Instant::now) + time_limit;
        let id = reports.next_id;
        reports.next_id += 1;
        reports.open.push(id);
        reports.questions.push((id, question.clone()));
        drop(reports);
        self.wake();
        let mut reports = lock(&self.reports);
        let known = loop {
            if let Some(cause) = &reports.failure {
                self.is_known.store(true, Ordering::Release);
                break Some(Some(cause.clone()));
            }
            if let Some(index) = reports.answers.iter().position(|(answered, _)| *answered == id) {
                break Some(reports.answers.swap_remove(index).1);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || reports.closing.is_some() {
                break None;
            }
            reports = self.changed.wait_timeout(reports, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        reports.open.retain(|open| *open != id);
        reports.answers.retain(|(answered, _)| *answered != id);
        drop(reports);
        if let Some(cause) = known {
            return cause;
        }
        if self.rank == 0 || self.closing().is_some() { None } else { self.without_an_answer(question) }
    }

    fn wake(&self) {
        self.job.thread().wake();
    }
}
