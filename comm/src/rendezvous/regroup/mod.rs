//! Regrouping of elastic groups ([`Elastic`]): the remaining ranks, and newcomers, form a new group.
//!
//! Each rank keeps a listener for regrouping, at an address that stays the same for as long as the rank is in the job, whatever
//! happens to its groups. All ranks know each other's addresses, so that no single one is needed to meet again. The lowest
//! remaining rank leads; the others connect to its listener:
//!
//! ```text
//! rank r                                lowest rank that is left
//!   handshake (regroup)             ->
//!   JoinAttempt: digest of what it  ->  asks what it knows where that is something else (Tell),
//!       knows                           waits until all are here, or known to have ended
//!                                   <-  GroupOffer: new rank, number of the group, what has changed, or a refusal
//!   Promise: nothing older any more ->  waits until all have promised
//!   ... and from here on as at the first meeting, over the same connection. A rank agrees to the group when it says
//!       that it is connected; the group has met when all have.
//! ```
//!
//! When a rank dies in the middle, all notice and start over; so they do when a leader stops responding while others wait
//! at its listener. A rank that was unresponsive and recovers leads if it is lower: the other leader then redirects those at
//! its listener, and goes there itself. Where some have met and others have not, those who have agreed to the group report
//! that in the next attempt. Each group has its own session nonce, which all its connections prove: nothing of an earlier
//! group can get into it.
//!
//! Ranks are identified by their number in the job's first group; newcomers have numbers of their own.
//!
//! There are never two groups, however ranks are partitioned: [`history`] contains the rule by which the remaining ranks
//! may go on without the others, and why it suffices. A rank that cannot be reached counts as alive. Two things prove
//! that a rank has ended ([`search`]): on its own host, that nothing listens at its address any more, or another program
//! does; and the report of the launcher that has seen its process end ([`Elastic::ended`]), which each launcher makes for
//! its own ranks, and which the launchers pass on to each other. Between hosts a refused connection proves nothing: a
//! firewall refuses on behalf of a rank that is alive. A rank that was left behind learns that it is excluded as soon as
//! it asks.
//!
//! The price of this: without a launcher, a job does not survive the loss of half of its ranks or more at once together
//! with their host, unless the remaining half contains the lowest rank; with a launcher on that host that survives, it
//! does. When the launcher is lost together with its host, the same holds as without one. Where half of the ranks or more
//! are missing at once, and even one of them is merely stopped, the others do not go on, even on one host: it may have
//! gone on with those that have ended. Less than half may be missing for any reason, one after the other down to a single
//! rank.

mod findings;
mod follow;
mod history;
mod knowledge;
mod lead;
mod listener;
mod message;
mod newcomer;
mod records;
mod search;

use std::cell::Cell;
use std::net::{SocketAddr, TcpListener};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use self::history::History;
use self::records::RegroupRecords;
use self::search::Search;
use super::meeting_file::MeetingFile;
use super::meeting_point::MeetingPoint;
use super::{Meeting, MeetingParams, OwnInfo, check_secret, listen};
use crate::base::lock;
use crate::base::members::Members;
use crate::connection::acceptor::{Acceptor, Limits};
use crate::connection::handshake::Credentials;
use crate::connection::poll_thread::PollThread;
use crate::connection::wire::HandshakeStream;
use crate::{Elastic, Error, Result, TcpConfig};

pub(crate) use knowledge::RankAddress;
pub(crate) use newcomer::join;

/// Time limit for forming a group, once all remaining ranks have come.
const FORM_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(5);

/// A rank's participation in a job whose group changes: its listener is open as long as this lives.
pub(crate) struct RegroupEndpoint {
    regroup_state: Arc<RegroupState>,
    _listener: Acceptor,
}

impl Deref for RegroupEndpoint {
    type Target = RegroupState;

    fn deref(&self) -> &RegroupState {
        &self.regroup_state
    }
}

/// State of a rank's listener: which ranks wait at it, and what this rank knows of the others.
pub(crate) struct RegroupState {
    /// This rank's number in the job.
    own: usize,
    /// Configuration with which the group was made, except for rank and world size.
    config: TcpConfig,
    /// File in which newcomers find the group.
    file: Option<PathBuf>,
    /// File in which a launcher lists the ranks whose processes it has seen end.
    ended: Option<PathBuf>,
    nonce: [u8; 32],
    credentials: Credentials,
    address: SocketAddr,
    state: Mutex<RegroupRecords<HandshakeStream>>,
    /// Notified when a rank has come.
    came: Condvar,
    /// Held while regrouping, so that there is one search at a time.
    turn: Mutex<()>,
    /// The file in which newcomers find the group, where this rank has written it.
    meeting_file: Mutex<Option<MeetingFile>>,
}

/// A new group that has met.
pub(crate) struct Regrouped {
    pub(crate) config: TcpConfig,
    pub(crate) meeting: Meeting,
    /// By rank: its number in the job.
    pub(crate) numbers: Vec<usize>,
}

/// Why an attempt has failed.
enum AttemptError {
    /// Another attempt may succeed.
    Again(String),
    Final(Error),
}

type Attempt<T> = std::result::Result<T, AttemptError>;

impl From<Error> for AttemptError {
    fn from(error: Error) -> Self {
        match error {
            Error::InvalidArgument { .. }
            | Error::NoSecret { .. }
            | Error::Listen { .. }
            | Error::System { .. } => AttemptError::Final(error),
            other => AttemptError::Again(other.to_string()),
        }
    }
}

/// Error of a rank without which the group has gone on.
fn excluded(rank: usize) -> Error {
    Error::Excluded { rank }
}

impl RegroupEndpoint {
    /// Opens this rank's listener; returns it and its port.
    pub(crate) fn listen(config: &TcpConfig) -> Result<(TcpListener, u16)> {
        if config.bind.is_unspecified() {
            let help = "a group that changes needs the one address by which the other ranks reach this host";
            return Err(Error::invalid("bind (GIRANDOLE_BIND)", config.bind, help));
        }
        check_secret(config, config.bind)?;
        let address = SocketAddr::new(config.bind, 0);
        let listener = listen(address)?;
        let port =
            listener.local_addr().map_err(|reason| Error::system("a listener's address", reason))?.port();
        Ok((listener, port))
    }

    /// Starts this rank's listener: connections are accepted from now on.
    pub(crate) fn open(
        listener: TcpListener,
        config: &TcpConfig,
        elastic: &Elastic,
        own: usize,
        nonce: [u8; 32],
    ) -> Result<Arc<Self>> {
        let address =
            listener.local_addr().map_err(|reason| Error::system("a listener's address", reason))?;
        let regroup_state = Arc::new(RegroupState {
            own,
            config: config.clone(),
            file: elastic.file.clone(),
            ended: elastic.ended.clone(),
            nonce,
            credentials: Credentials::of(config)?.bound_to(&nonce),
            address,
            state: Mutex::default(),
            came: Condvar::new(),
            turn: Mutex::default(),
            meeting_file: Mutex::default(),
        });
        let _listener = Acceptor::start(
            vec![listener],
            Limits::default(),
            regroup_state.clone(),
            &PollThread::default(),
        )?;
        Ok(Arc::new(Self { regroup_state, _listener }))
    }
}

impl RegroupState {
    fn state(&self) -> MutexGuard<'_, RegroupRecords<HandshakeStream>> {
        lock(&self.state)
    }

    /// Returns what the others must know of this rank.
    pub(crate) fn contact(&self) -> RankAddress {
        RankAddress { number: self.own, address: self.address }
    }

    /// Records the job's first group, which has met.
    pub(crate) fn set_first_group(&self, contacts: &[RankAddress]) -> Result<()> {
        self.set_group(History::first(contacts.iter().map(|contact| contact.number).collect()), contacts)
    }

    /// Returns whether this rank is a member of the newest group that it knows to have met.
    fn has_met(&self) -> bool {
        self.state().history().has_met_with(self.own)
    }

    /// Makes this rank a newcomer again. What it has promised stays.
    fn forget_groups(&self) {
        self.state().set_history(History::default());
    }

    /// Records a group that this rank has agreed to, or that all others have agreed to, where this rank leads.
    fn agree(&self, history: History) {
        self.state().set_history(history);
    }

    /// Records the new group, which has met.
    fn set_group(&self, history: History, contacts: &[RankAddress]) -> Result<()> {
        let mut state = self.state();
        let is_first = contacts.first().is_some_and(|first| first.number == self.own);
        let has_met = state.history().is_known();
        // A rank that was first in its group stays first, and keeps its file.
        let mut meeting_file = lock(&self.meeting_file);
        if let (Some(path), true, None) = (&self.file, is_first, &*meeting_file) {
            match MeetingFile::write(path, self.address, self.nonce) {
                Ok(file) => *meeting_file = Some(file),
                Err(error) if !has_met => return Err(error),
                // Only new ranks need it, and the next group tries again.
                Err(error) => tracing::warn!("no rank can join this group: {error}"),
            }
        }
        state.set_history(history);
        state.forget_ended();
        state.add_addresses(contacts);
        state.away = false;
        // These came before this rank knew who is in the group.
        let newcomers = std::mem::take(&mut state.newcomers);
        let (refused, waiting): (Vec<_>, Vec<_>) =
            newcomers.into_iter().partition(|peer| state.has_another(&peer.contact));
        state.newcomers = waiting;
        drop(state);
        refused.into_iter().for_each(|peer| {
            let reason = listener::duplicate_number(peer.contact.number);
            peer.refuse(reason);
        });
        Ok(())
    }

    /// Forms a new group of the remaining ranks, and of newcomers as far as it has no more than `room` ranks with them.
    /// The `blamed` ranks are not waited for.
    pub(crate) fn regroup(&self, blamed: &[usize], room: usize) -> Result<Regrouped> {
        let _turn = lock(&self.turn);
        let started = Instant::now();
        let deadline = started + self.config.bounded_timeout();
        let mut search = Search::new(self, blamed, deadline);
        let mut last = None;
        loop {
            let began = Instant::now();
            let outcome = match search.find_leader() {
                Ok(Some((leader, address))) => self.follow(&mut search, leader, address),
                Ok(None) => self.lead(&mut search, room),
                Err(miss) => Err(miss),
            };
            self.state().away = false;
            match outcome {
                Ok(regrouped) => return Ok(regrouped),
                Err(AttemptError::Final(error)) => return Err(error),
                Err(AttemptError::Again(why)) => {
                    // An attempt that the deadline cuts short says less than the one before it.
                    let why = last.filter(|_| began + self.silence() >= deadline).unwrap_or(why);
                    if Instant::now() >= deadline {
                        self.report_failure(&why);
                        return Err(Error::Regroup {
                            rank: self.own,
                            waited: started.elapsed(),
                            detail: why,
                        });
                    }
                    tracing::debug!(rank = self.own, "coming together again: {why}");
                    last = Some(why);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Returns the plan of an attempt. `relevant_ranks`: the members by rank, or this rank alone where they are not known yet.
    fn plan<'a>(
        &self,
        config: &'a TcpConfig,
        contacts: &[RankAddress],
        own: OwnInfo,
        deadline: Instant,
    ) -> MeetingParams<'a> {
        let started = Instant::now();
        MeetingParams {
            config,
            bind: Cell::new(config.bind),
            place: MeetingPoint::Address { host: self.address.ip().to_string(), port: self.address.port() },
            limits: Limits::default(),
            started,
            deadline: deadline.min(started + FORM_TIMEOUT),
            own,
            credentials: self.credentials.clone(),
            members: Members::subgroup(contacts.iter().map(|contact| contact.number)),
            // Not watched: it is the group that has failed.
            parent: None,
            regroup_port: 0,
            thread: PollThread::default(),
            agreed: None,
        }
    }

    fn config_as(&self, rank: usize, world_size: usize) -> TcpConfig {
        TcpConfig { rank, world_size, elastic: None, ..self.config.clone() }
    }
}

impl std::fmt::Debug for RegroupEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RegroupEndpoint(rank {} at {})", self.own, self.address)
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
