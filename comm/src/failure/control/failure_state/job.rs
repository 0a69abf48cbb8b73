//! State shared by a process group and the groups created from it: which ranks each is waiting for, and the first
//! failure.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};

use crate::base::cause::Cause;
use crate::base::lock;
use crate::connection::connect_error::ConnectError;
use crate::connection::poll_thread::PollThread;
use crate::failure::control::failure_state::FailureState;
use crate::failure::diagnosis::OtherGroupCall;
use crate::{Error, Result};

/// The groups of one job in this process. Ranks are given by their numbers in the whole job here.
#[derive(Debug, Default)]
pub(crate) struct Job {
    /// Serves the control connections and the listeners of all groups.
    thread: PollThread,
    /// The first one is the group of all ranks; the others were created from it.
    groups: Mutex<Vec<Weak<FailureState>>>,
    /// The first failure. Cleared when the program, which knows of it, continues with another group.
    failure: Mutex<Option<Cause>>,
    /// Why this rank's program cannot go on, as it said itself. Never cleared.
    announced: Mutex<Option<Cause>>,
    /// Attempts in progress to form new groups with other ranks.
    meetings: Mutex<Vec<Formation>>,
}

/// An attempt of this rank to form a new group with others.
#[derive(Debug)]
struct Formation {
    waits: Arc<OtherGroupCall>,
    /// The group from which the new one is created.
    parent: Weak<FailureState>,
    /// Dropped to cancel the attempt, when not all of the ranks will take part.
    stop: Option<UnixStream>,
}

impl Formation {
    /// Whether the failure of `group` cancels this attempt: it is the parent, or a larger group that contains all ranks
    /// of the attempt. A rank that learns of that failure no longer takes part, even if the parent group has not
    /// failed.
    fn is_of(&self, group: &FailureState) -> bool {
        let (waits, members) = (&self.waits.waits, &group.members);
        let is_larger = members.world_ranks().len() > waits.len() + 1;
        self.has_parent(group) || is_larger && waits.iter().all(|number| members.rank_of(*number).is_some())
    }

    fn has_parent(&self, group: &FailureState) -> bool {
        std::ptr::eq(self.parent.as_ptr(), group)
    }
}

/// An attempt to form a group with other ranks. It is registered in the job until this is dropped.
#[derive(Debug)]
pub(crate) struct FormationGuard {
    job: Arc<Job>,
    waits: Arc<OtherGroupCall>,
    /// Becomes readable when not all ranks will take part: the parent group has failed or is closed, or a larger group
    /// that contains all of the ranks has failed.
    pub(crate) ended: Arc<UnixStream>,
    /// The groups, other than the parent, that contain all ranks of the attempt.
    pub(crate) above: Vec<Arc<FailureState>>,
}

impl Drop for FormationGuard {
    fn drop(&mut self) {
        lock(&self.job.meetings).retain(|other| !Arc::ptr_eq(&other.waits, &self.waits));
    }
}

impl Job {
    pub(crate) fn new(thread: PollThread) -> Self {
        Self { thread, ..Self::default() }
    }

    pub(crate) fn thread(&self) -> &PollThread {
        &self.thread
    }

    /// Adds a group.
    pub(crate) fn add(&self, group: &Arc<FailureState>) {
        let mut groups = lock(&self.groups);
        let mut is_first = true;
        // The first one stays in the list, even after it is closed.
        groups.retain(|group| std::mem::take(&mut is_first) || group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// Returns the group of all ranks, unless it is closed.
    pub(super) fn world(&self) -> Option<Arc<FailureState>> {
        lock(&self.groups).first()?.upgrade()
    }

    pub(super) fn groups(&self) -> Vec<Arc<FailureState>> {
        lock(&self.groups).iter().filter_map(Weak::upgrade).collect()
    }

    /// Registers that this rank waits for the ranks `waits`, to form a group with them from the group `parent`.
    ///
    /// # Errors
    /// If the system cannot create a socket pair.
    pub(crate) fn begin_formation(
        self: &Arc<Self>,
        parent: &Arc<FailureState>,
        call: String,
        waits: Vec<usize>,
    ) -> Result<FormationGuard> {
        let pair = UnixStream::pair();
        let (stop, ended) =
            pair.map_err(|reason| Error::system("making a socket pair", ConnectError::from(reason)))?;
        let waits = Arc::new(OtherGroupCall { call, waits });
        let meeting = Formation { waits: waits.clone(), parent: Arc::downgrade(parent), stop: Some(stop) };
        // A failed group is ignored if the program knows of its failure and continues with others.
        let counts = |group: &FailureState| {
            meeting.is_of(group)
                && group.closing().is_none()
                && (!group.has_failed() || group.is_unreported())
        };
        let above = self.groups().into_iter().filter(|group| !meeting.has_parent(group) && counts(group));
        let above: Vec<_> = above.collect();
        lock(&self.meetings).push(meeting);
        // Groups that fail from now on cancel the attempt themselves.
        above.iter().filter(|group| group.has_failed()).for_each(|group| self.end_meetings(group, false));
        if parent.has_failed() || parent.closing().is_some() {
            self.end_meetings(parent, true);
        }
        Ok(FormationGuard { job: self.clone(), waits, ended: Arc::new(ended), above })
    }

    pub(crate) fn formations(&self) -> Vec<Arc<OtherGroupCall>> {
        lock(&self.meetings).iter().map(|meeting| meeting.waits.clone()).collect()
    }

    /// Cancels the attempts to form groups that a failed (or `closed`) group makes impossible.
    pub(super) fn end_meetings(&self, group: &FailureState, closed: bool) {
        for meeting in &mut *lock(&self.meetings) {
            // Closing a group does not affect the forming of groups from other parents.
            let is_over = if closed { meeting.has_parent(group) } else { meeting.is_of(group) };
            meeting.stop.take_if(|_| is_over);
        }
    }

    /// Records the failure of one of the groups. Only the first is kept.
    pub(super) fn note(&self, cause: Cause) {
        lock(&self.failure).get_or_insert(cause);
    }

    /// Called when the program calls an operation of a group that has not failed. If all failures have been reported to
    /// the program, it is continuing without the failed groups, and the recorded failure is cleared.
    pub(super) fn clear_reported_failure(&self) {
        let mut failure = lock(&self.failure);
        if failure.is_some() && !self.groups().iter().any(|group| group.is_unreported()) {
            *failure = None;
        }
    }

    /// Records that this rank's program cannot go on. Only the first reason is kept.
    pub(super) fn announce(&self, cause: Cause) {
        lock(&self.announced).get_or_insert(cause);
    }

    /// Returns why this rank leaves its groups: what its program has announced, or else the first recorded failure.
    pub(super) fn reason_to_leave(&self) -> Option<Cause> {
        lock(&self.announced).clone().or_else(|| self.failure())
    }

    /// Returns the cause of the first recorded failure.
    pub(super) fn failure(&self) -> Option<Cause> {
        lock(&self.failure).clone()
    }
}
