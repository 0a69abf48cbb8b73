//! State that the threads of one group share: their streams, what each rank is doing, and the cause of a failure.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::base::cause::Cause;
use crate::base::fingerprint::Fingerprint;
use crate::base::lock;
use crate::base::members::Members;
use crate::failure::diagnosis::{Activity, Question, Status, choose_cause};
use crate::failure::supervisor::Supervisor;
use crate::transport::links::{Closed, Wait};

use super::LocalConfig;

/// Capacity of a stream in bytes.
const STREAM_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct LocalGroup {
    /// By receiving rank.
    inboxes: Vec<Inbox>,
    statuses: Vec<Mutex<Status>>,
    failure: Mutex<Option<Cause>>,
    config: LocalConfig,
    reasons: Arc<Reasons>,
    groups: Mutex<PendingGroups>,
    pub(super) gathering: Mutex<ShrinkState>,
    /// Notified when a rank has joined the gathering, or is gone.
    pub(super) gathered: Condvar,
}

/// The ranks that wait in `shrink` for a smaller group, and that group once it is made.
#[derive(Debug, Default)]
pub(super) struct ShrinkState {
    pub(super) here: BTreeSet<usize>,
    pub(super) made: Option<(Arc<LocalGroup>, Vec<usize>)>,
}

/// Subgroups that not all members have joined yet.
#[derive(Debug, Default)]
struct PendingGroups {
    made: i64,
    /// By number: the group, and how many members have not joined yet.
    open: HashMap<i64, (Arc<LocalGroup>, usize)>,
}

/// Why ranks leave their groups, as far as they know: by their number in the whole job, and with such numbers. Shared by a
/// group and those made from it.
#[derive(Debug, Default)]
pub(super) struct Reasons(Mutex<HashMap<usize, Cause>>);

impl Reasons {
    /// Records why a rank is about to leave, in place of what was recorded before.
    pub(super) fn record(&self, number: usize, cause: Cause) {
        lock(&self.0).insert(number, cause);
    }

    fn of(&self, number: usize) -> Option<Cause> {
        lock(&self.0).get(&number).cloned()
    }
}

/// The streams to one rank, from all others.
#[derive(Debug, Default)]
struct Inbox {
    state: Mutex<InboxState>,
    /// Notified when anything changes that this rank may wait for.
    woken: Condvar,
}

#[derive(Debug, Default)]
struct InboxState {
    /// By sending rank; created when first used.
    streams: HashMap<usize, VecDeque<u8>>,
    wake_ups: u64,
}

impl LocalGroup {
    pub(super) fn new(world_size: usize, config: &LocalConfig) -> Self {
        Self::with(world_size, config, Arc::default())
    }

    /// Creates a group of some ranks of this one.
    pub(super) fn subgroup(&self, world_size: usize) -> Self {
        Self::with(world_size, &self.config, self.reasons.clone())
    }

    fn with(world_size: usize, config: &LocalConfig, reasons: Arc<Reasons>) -> Self {
        let inboxes = (0..world_size).map(|_| Inbox::default()).collect();
        let statuses = (0..world_size).map(|_| Mutex::new(Status::Active(Activity::default()))).collect();
        Self {
            inboxes,
            statuses,
            failure: Mutex::default(),
            config: config.clone(),
            reasons,
            groups: Mutex::default(),
            gathering: Mutex::default(),
            gathered: Condvar::new(),
        }
    }

    pub(super) fn config(&self) -> &LocalConfig {
        &self.config
    }

    pub(super) fn reasons(&self) -> &Reasons {
        &self.reasons
    }

    /// Keeps a new group until `members` other ranks have taken it. Returns its number.
    pub(super) fn offer(&self, group: &Arc<LocalGroup>, members: usize) -> i64 {
        let mut groups = lock(&self.groups);
        groups.made += 1;
        let number = groups.made;
        if members > 0 {
            groups.open.insert(number, (group.clone(), members));
        }
        number
    }

    /// Returns the offered group to one of its members; None where it is not on offer.
    pub(super) fn take(&self, number: i64) -> Option<Arc<LocalGroup>> {
        let mut groups = lock(&self.groups);
        let (group, to_come) = groups.open.get_mut(&number)?;
        *to_come -= 1;
        let (group, to_come) = (group.clone(), *to_come);
        if to_come == 0 {
            groups.open.remove(&number);
        }
        Some(group)
    }

    pub(super) fn world_size(&self) -> usize {
        self.inboxes.len()
    }

    pub(super) fn supervisor(self: &Arc<Self>, rank: usize, members: Members) -> Arc<dyn Supervisor> {
        Arc::new(GroupMember { rank, shared: self.clone(), members })
    }

    /// Writes as many bytes as there is room for, and returns their number.
    pub(super) fn write(&self, from: usize, to: usize, parts: [&[u8]; 2]) -> Result<usize, Closed> {
        if self.is_gone(to) || lock(&self.failure).is_some() {
            return Err(Closed);
        }
        let inbox = &self.inboxes[to];
        let mut state = lock(&inbox.state);
        let stream = state.streams.entry(from).or_default();
        let before = stream.len();
        for part in parts {
            let room = STREAM_BYTES.saturating_sub(stream.len());
            stream.extend(&part[..part.len().min(room)]);
        }
        let written = stream.len() - before;
        if written > 0 {
            state.wake_ups += 1;
            inbox.woken.notify_all();
        }
        Ok(written)
    }

    /// Reads bytes that have arrived. The end of a stream is reported once it is empty.
    pub(super) fn read(&self, from: usize, to: usize, into: &mut [u8]) -> Result<usize, Closed> {
        // Checked first: what was written before the sender left is still read.
        let ended = self.is_gone(from) || lock(&self.failure).is_some();
        let mut state = lock(&self.inboxes[to].state);
        let stream = state.streams.entry(from).or_default();
        let len = into.len().min(stream.len());
        if len == 0 {
            return if ended { Err(Closed) } else { Ok(0) };
        }
        let (front, back) = stream.as_slices();
        let of_front = len.min(front.len());
        into[..of_front].copy_from_slice(&front[..of_front]);
        into[of_front..len].copy_from_slice(&back[..len - of_front]);
        let was_full = stream.len() >= STREAM_BYTES;
        stream.drain(..len);
        drop(state);
        if was_full {
            self.ring(from);
        }
        Ok(len)
    }

    /// Returns a number that changes with each wake-up of the rank.
    pub(super) fn wake_ups(&self, rank: usize) -> u64 {
        lock(&self.inboxes[rank].state).wake_ups
    }

    /// Blocks until the rank was woken since the counter was `seen`, or `timeout` has passed.
    pub(super) fn sleep(&self, rank: usize, seen: u64, timeout: Duration) {
        let inbox = &self.inboxes[rank];
        let state = lock(&inbox.state);
        let woken = inbox.woken.wait_timeout_while(state, timeout, |state| state.wake_ups == seen);
        drop(woken.unwrap_or_else(PoisonError::into_inner));
    }

    /// Marks a rank as gone and wakes all others. A death fails the whole group at once.
    pub(super) fn leave(&self, rank: usize, died: bool) {
        *lock(&self.statuses[rank]) = if died { Status::Died } else { Status::Left };
        if died {
            lock(&self.failure).get_or_insert(Cause::Died { rank });
        }
        self.ring_all();
        // Passing through the lock: a rank in `shrink` has either seen this rank gone, or already waits to be notified.
        drop(lock(&self.gathering));
        self.gathered.notify_all();
    }

    /// Returns the ranks that have neither left nor died.
    pub(super) fn present(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.world_size()).filter(|rank| !self.is_gone(*rank))
    }

    fn is_gone(&self, rank: usize) -> bool {
        !matches!(*lock(&self.statuses[rank]), Status::Active(_))
    }

    fn ring(&self, rank: usize) {
        let inbox = &self.inboxes[rank];
        lock(&inbox.state).wake_ups += 1;
        inbox.woken.notify_all();
    }

    fn ring_all(&self) {
        (0..self.world_size()).for_each(|rank| self.ring(rank));
    }
}

/// One rank's view of the group, as its supervisor.
#[derive(Debug)]
struct GroupMember {
    rank: usize,
    shared: Arc<LocalGroup>,
    members: Members,
}

impl GroupMember {
    fn activity(&self, change: impl FnOnce(&mut Activity)) {
        if let Status::Active(activity) = &mut *lock(&self.shared.statuses[self.rank]) {
            change(activity);
        }
    }
}

impl GroupMember {
    /// A rank that has left because its program, or another rank, has failed is not the cause itself.
    fn cause_of_leaving(&self, cause: Cause) -> Cause {
        let Cause::Left { rank } = cause else { return cause };
        let Some(reason) = self.shared.reasons.of(self.members.world_rank(rank)) else { return cause };
        let own = reason.renumbered(|number| self.members.rank_of(number));
        own.unwrap_or_else(|| Cause::InJob { cause: Box::new(reason), host: self.host(rank) })
    }

    /// Records the failure that this rank learns of: it is about to leave its other groups for that reason.
    fn record(&self, cause: &Cause) {
        let in_job = match cause {
            Cause::InJob { cause, .. } => Some((**cause).clone()),
            cause => cause.renumbered(|rank| Some(self.members.world_rank(rank))),
        };
        let in_job = in_job.filter(|cause| matches!(cause, Cause::Died { .. } | Cause::Program { .. }));
        in_job
            .into_iter()
            .for_each(|cause| self.shared.reasons.record(self.members.world_rank(self.rank), cause));
    }
}

impl Supervisor for GroupMember {
    fn begin(&self, call: Fingerprint) {
        self.activity(|activity| activity.begin(call));
    }

    fn wait_for(&self, waits: &[Wait]) {
        self.activity(|activity| activity.wait_for(&mut waits.iter().map(|wait| wait.peer)));
    }

    fn end(&self) {
        self.activity(Activity::end);
    }

    fn announce(&self, reason: &str) {
        let number = self.members.world_rank(self.rank);
        self.shared.reasons.record(number, Cause::program(number, reason));
    }

    fn failure(&self) -> Option<Cause> {
        let failure = lock(&self.shared.failure).clone();
        failure.inspect(|cause| self.record(cause))
    }

    fn ask(&self, question: Question) -> Option<Cause> {
        let mut failure = lock(&self.shared.failure);
        if failure.is_none() {
            let statuses: Vec<Status> =
                self.shared.statuses.iter().map(|status| lock(status).clone()).collect();
            let cause =
                choose_cause(self.rank, &question, &statuses).map(|cause| self.cause_of_leaving(cause));
            if !question.is_fatal() || cause.is_none() {
                return cause;
            }
            *failure = cause;
        }
        let cause = failure.clone();
        drop(failure);
        self.shared.ring_all();
        cause.inspect(|cause| self.record(cause))
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> &Members {
        &self.members
    }

    fn host(&self, _rank: usize) -> String {
        "this process".into()
    }

    fn timeout(&self) -> Duration {
        self.shared.config.timeout
    }

    fn slow_warning(&self) -> Duration {
        self.shared.config.slow_warning
    }
}
