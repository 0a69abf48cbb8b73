//! What the groups have in common that one process has made of another: who is waited for in any of them, and the first cause
//! for which one of them has failed.

use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, Weak};

use crate::base::cause::Cause;
use crate::base::lock::lock;
use crate::blame::control::bureau::Bureau;
use crate::blame::verdict::Elsewhere;
use crate::rendezvous::connection::fault::Fault;
use crate::{Error, Result};

/// The groups of one job in this process. Ranks have their numbers in the whole job here.
#[derive(Debug, Default)]
pub(crate) struct Job {
    /// The first one is that of all ranks; the others were made of it.
    groups: Mutex<Vec<Weak<Bureau>>>,
    /// Until the program, told of it, goes on with another group.
    failure: Mutex<Option<Cause>>,
    /// Groups that this rank is about to make with others.
    meetings: Mutex<Vec<Meeting>>,
}

/// A group that this rank is about to make with others.
#[derive(Debug)]
struct Meeting {
    waits: Arc<Elsewhere>,
    /// The group that they are of.
    parent: Weak<Bureau>,
    /// Until not all of them will come.
    stop: Option<UnixStream>,
}

impl Meeting {
    /// Whether all who meet are of this group: that of which they make the new one, or a larger one. Who of the others is told
    /// that it has failed comes no more, even if its parent goes on.
    fn is_of(&self, group: &Bureau) -> bool {
        let (waits, members) = (&self.waits.waits, &group.members);
        let is_larger = members.world_ranks().len() > waits.len() + 1;
        self.has_parent(group) || is_larger && waits.iter().all(|number| members.rank_of(*number).is_some())
    }

    fn has_parent(&self, group: &Bureau) -> bool {
        std::ptr::eq(self.parent.as_ptr(), group)
    }
}

/// This rank meets others, as long as this lives.
#[derive(Debug)]
pub(crate) struct Meets {
    job: Arc<Job>,
    waits: Arc<Elsewhere>,
    /// Becomes readable when not all of them will come: the group of which they are has failed, or is closed, or one has failed
    /// that it is a part of.
    pub(crate) ended: Arc<UnixStream>,
    /// The groups of which all who meet are, beside their parent.
    pub(crate) above: Vec<Arc<Bureau>>,
}

impl Drop for Meets {
    fn drop(&mut self) {
        lock(&self.job.meetings).retain(|other| !Arc::ptr_eq(&other.waits, &self.waits));
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

    /// This rank waits for others of the group `parent`, to make a group with them.
    ///
    /// # Errors
    /// A system that is out of sockets.
    pub(crate) fn meet(
        self: &Arc<Self>,
        parent: &Arc<Bureau>,
        call: String,
        waits: Vec<usize>,
    ) -> Result<Meets> {
        let pair = UnixStream::pair();
        let (stop, ended) =
            pair.map_err(|reason| Error::system("making a socket pair", Fault::from(reason)))?;
        let waits = Arc::new(Elsewhere { call, waits });
        let meeting = Meeting { waits: waits.clone(), parent: Arc::downgrade(parent), stop: Some(stop) };
        // One for which the program was told goes on with the others has no say in what it does next.
        let counts = |group: &Bureau| {
            meeting.is_of(group) && group.closing().is_none() && (!group.has_failed() || group.is_untold())
        };
        let above = self.groups().into_iter().filter(|group| !meeting.has_parent(group) && counts(group));
        let above: Vec<_> = above.collect();
        lock(&self.meetings).push(meeting);
        // Those that fail from now on end it themselves.
        above.iter().filter(|group| group.has_failed()).for_each(|group| self.end_meetings(group, false));
        if parent.has_failed() || parent.closing().is_some() {
            self.end_meetings(parent, true);
        }
        Ok(Meets { job: self.clone(), waits, ended: Arc::new(ended), above })
    }

    pub(crate) fn meetings(&self) -> Vec<Arc<Elsewhere>> {
        lock(&self.meetings).iter().map(|meeting| meeting.waits.clone()).collect()
    }

    /// A group has failed, or is `closed`: those who are about to make others of its ranks wait no longer.
    pub(super) fn end_meetings(&self, group: &Bureau, closed: bool) {
        for meeting in &mut *lock(&self.meetings) {
            // Parts of a group go on when it is closed.
            let is_over = if closed { meeting.has_parent(group) } else { meeting.is_of(group) };
            meeting.stop.take_if(|_| is_over);
        }
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
