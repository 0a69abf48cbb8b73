//! What the groups have in common that one process has made of another: who is waited for in any of them, and the first cause
//! for which one of them has failed.

use std::sync::{Arc, Mutex, Weak};

use crate::base::cause::Cause;
use crate::base::lock::lock;
use crate::blame::control::bureau::Bureau;
use crate::blame::verdict::Elsewhere;

/// The groups of one job in this process. Ranks have their numbers in the whole job here.
#[derive(Debug, Default)]
pub(crate) struct Job {
    /// The first one is that of all ranks; the others were made of it.
    groups: Mutex<Vec<Weak<Bureau>>>,
    /// Until the program, told of it, goes on with another group.
    failure: Mutex<Option<Cause>>,
    /// Groups that this rank is about to make with others.
    meetings: Mutex<Vec<Arc<Elsewhere>>>,
}

/// This rank meets others, as long as this lives.
pub(crate) struct Meets<'a> {
    job: &'a Job,
    meeting: Arc<Elsewhere>,
}

impl Drop for Meets<'_> {
    fn drop(&mut self) {
        lock(&self.job.meetings).retain(|other| !Arc::ptr_eq(other, &self.meeting));
    }
}

impl Job {
    /// One more group.
    pub(crate) fn add(&self, group: &Arc<Bureau>) {
        let mut groups = lock(&self.groups);
        let mut is_first = true;
        // The first one keeps its place, even when it is closed.
        groups.retain(|group| std::mem::take(&mut is_first) || group.strong_count() > 0);
        groups.push(Arc::downgrade(group));
    }

    /// The group of all ranks, unless it is closed.
    pub(super) fn world(&self) -> Option<Arc<Bureau>> {
        lock(&self.groups).first()?.upgrade()
    }

    pub(super) fn groups(&self) -> Vec<Arc<Bureau>> {
        lock(&self.groups).iter().filter_map(Weak::upgrade).collect()
    }

    /// This rank waits for others, to make a group with them.
    pub(crate) fn meet(&self, call: String, waits: Vec<usize>) -> Meets<'_> {
        let meeting = Arc::new(Elsewhere { call, waits });
        lock(&self.meetings).push(meeting.clone());
        Meets { job: self, meeting }
    }

    pub(crate) fn meetings(&self) -> Vec<Arc<Elsewhere>> {
        lock(&self.meetings).clone()
    }

    /// One of the groups has failed.
    pub(super) fn note(&self, cause: Cause) {
        lock(&self.failure).get_or_insert(cause);
    }

    /// The program calls an operation of a group that has not failed. Where it was told of those that have, it goes on without
    /// them, and they explain nothing of what comes later.
    pub(super) fn go_on(&self) {
        let mut failure = lock(&self.failure);
        if failure.is_some() && !self.groups().iter().any(|group| group.is_untold()) {
            *failure = None;
        }
    }

    /// Why the first of them has failed.
    pub(super) fn failure(&self) -> Option<Cause> {
        lock(&self.failure).clone()
    }
}
