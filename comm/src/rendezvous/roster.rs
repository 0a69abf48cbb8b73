//! Roster of rank 0: the ranks that have registered so far.

use std::fmt::Write;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::MeetingParams;
use super::machine::BuildInfo;
use super::message::{Entry, Failure, HELLO_LIMIT, Hello, LIMIT, MAX_HOST, ToLeader, ToMember};
use crate::base::lock;
use crate::base::members::Members;
use crate::connection::acceptor::ConnectionHandler;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Admission, ClientClaim, Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::{HandshakeStream, parse, wait_any};
use crate::rendezvous::text::sanitize;
use crate::{Error, Result};

/// How often rank 0 checks whether a rank that waits has died.
const ROUND: Duration = Duration::from_millis(100);
/// How long a message may take that has begun to arrive.
const MESSAGE: Duration = Duration::from_secs(1);

/// The ranks that have registered with rank 0 so far.
pub(super) struct Roster {
    credentials: Credentials,
    members: Members,
    /// Host name of rank 0.
    host: String,
    /// When the time for the meeting is over.
    deadline: Instant,
    state: Mutex<RosterState>,
    changed: Condvar,
}

struct RosterState {
    /// By rank; that of rank 0 stays empty.
    ranks: Vec<Option<RegisteredRank>>,
    /// Number of ranks that are missing.
    missing: usize,
    /// When the first of the registered ranks cannot wait any longer.
    until: Instant,
    /// Whether there is a reason to look at the registered ranks at once.
    look: bool,
    /// Number of connections that came without proof.
    strangers: usize,
    /// Why the last rank with a valid proof was refused.
    refused: Option<String>,
    /// Set when there will be no group.
    failure: Option<Failure>,
}

struct RegisteredRank {
    /// `None` once [`Roster::take_wires`] has taken it.
    wire: Option<HandshakeStream>,
    entry: Entry,
    /// Address of the rank's host; `None` where it is this host.
    host_ip: Option<IpAddr>,
}

impl ConnectionHandler for Roster {
    fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Answers a rank, which introduces itself next. It has until the meeting's deadline, like all ranks.
    fn admit(&self, wire: &mut HandshakeStream, admission: &Admission) -> ConnectResult<Option<usize>> {
        let ClientClaim { rank, world_size, purpose } = admission.caller;
        let status = match () {
            () if world_size != self.world_size() => HandshakeStatus::OtherWorldSize,
            () if purpose != Purpose::Control || rank == 0 || rank >= world_size => {
                HandshakeStatus::NotAwaited
            }
            () => HandshakeStatus::Admitted,
        };
        let verdict = Verdict { status, rank: 0, world_size: self.world_size() };
        wire.write(&admission.answer(verdict), self.deadline)?;
        if status == HandshakeStatus::OtherWorldSize {
            let number = self.members.world_rank(rank as usize);
            self.note(format!(
                "rank {number} came with world size {world_size}, this group has {}",
                self.world_size()
            ));
        }
        match status {
            HandshakeStatus::Admitted => Ok(Some(HELLO_LIMIT)),
            _ => Err(ConnectError::NotAwaited),
        }
    }

    fn receive(&self, wire: HandshakeStream, admission: &Admission, message: &[u8]) -> ConnectResult<()> {
        self.introduce(wire, admission, parse(message.get(4..).unwrap_or_default())?)
    }

    fn serve(&self, mut wire: HandshakeStream, admission: Admission, _: Instant) -> ConnectResult<()> {
        match wire.receive(HELLO_LIMIT, self.deadline) {
            Err(ConnectError::Stopped) => self.send_away(wire),
            hello => self.introduce(wire, &admission, hello?),
        }
    }

    fn rejected(&self) {
        self.state().strangers += 1;
    }
}

impl Roster {
    /// `host`: name of the host of rank 0. `deadline`: when the time for the meeting is over.
    pub(super) fn new(members: Members, host: String, credentials: Credentials, deadline: Instant) -> Self {
        let ranks: Vec<_> = members.world_ranks().iter().map(|_| None).collect();
        let (missing, until) = (ranks.len() - 1, deadline);
        let state =
            RosterState { ranks, missing, until, look: false, strangers: 0, refused: None, failure: None };
        let state = Mutex::new(state);
        Self { credentials, members, host, deadline, state, changed: Condvar::new() }
    }

    /// Returns the number of ranks.
    fn world_size(&self) -> u32 {
        self.members.world_ranks().len() as u32
    }

    fn state(&self) -> MutexGuard<'_, RosterState> {
        lock(&self.state)
    }

    /// Registers a rank that introduces itself over its control connection, or tells it why it cannot take part.
    fn introduce(&self, mut wire: HandshakeStream, admission: &Admission, hello: Hello) -> ConnectResult<()> {
        let (rank, deadline) = (admission.caller.rank as usize, self.deadline);
        let number = self.members.world_rank(rank);
        if let Some(reason) = self.incompatibility(number, &hello) {
            wire.send(&ToMember::Refused(reason.clone()), deadline)?;
            self.note(reason);
            return Ok(());
        }
        if let Some((mut wire, reason)) = self.register(rank, wire, hello)? {
            wire.send(&ToMember::Refused(reason.clone()), deadline)?;
            self.note(format!("a second rank {number} came: {reason}"));
        }
        Ok(())
    }

    /// Marks the meeting as failed: ranks that are admitted from now on are told so.
    pub(super) fn mark_failed(&self, failure: Failure) {
        self.state().failure = Some(failure);
    }

    /// Reports the failure to a rank that is about to introduce itself after the meeting has failed.
    fn send_away(&self, mut wire: HandshakeStream) -> ConnectResult<()> {
        let Some(failure) = self.state().failure.clone() else { return Err(ConnectError::Stopped) };
        wire.detach();
        let until = Instant::now() + MESSAGE;
        // Unread input could make the system reset the connection before the answer is read.
        let _ = wire.receive::<Hello>(HELLO_LIMIT, until);
        wire.send(&ToMember::Failed(failure), until)?;
        wire.close_gracefully();
        Ok(())
    }

    /// Returns why the rank with this world rank cannot be in a group with this one.
    fn incompatibility(&self, number: usize, hello: &Hello) -> Option<String> {
        let (own, host) = (self.members.world_rank(0), sanitize(&hello.host, MAX_HOST));
        BuildInfo::own().incompatibility((own, &self.host), &hello.machine, (number, &host))
    }

    fn note(&self, refused: String) {
        tracing::warn!("refused: {refused}");
        self.state().refused = Some(refused);
    }

    /// Registers a rank. Returns the connection, with a reason, where its rank is taken.
    fn register(
        &self,
        rank: usize,
        mut wire: HandshakeStream,
        hello: Hello,
    ) -> ConnectResult<Option<(HandshakeStream, String)>> {
        let from = wire.peer()?.ip().to_canonical();
        let host_ip = (!wire.is_local_to(from)?).then_some(from);
        let time_limit = Duration::from_millis(hello.timeout_ms).min(Duration::from_secs(1 << 25));
        let entry = entry(hello, from);
        let mut state = self.state();
        let Some(place) = state.ranks.get_mut(rank) else { return Err(ConnectError::NotAwaited) };
        if let Some(RegisteredRank { entry, wire: registered_wire, .. }) = place {
            // The registered rank has died or has given up, and this connection may be from a launcher that reports it.
            if registered_wire.as_ref().is_some_and(HandshakeStream::is_readable) {
                state.look = true;
                self.changed.notify_all();
                return Err(ConnectError::NotAwaited);
            }
            let number = self.members.world_rank(rank);
            let reason =
                format!("rank {number} is already here, from host {}, pid {}", entry.host, entry.pid);
            return Ok(Some((wire, reason)));
        }
        wire.detach();
        // A rank that cannot listen reports why next.
        let gives_up = entry.address.port() == 0;
        *place = Some(RegisteredRank { wire: Some(wire), entry, host_ip });
        state.missing -= 1;
        state.look |= gives_up || state.missing == 0;
        let (until, sooner) = (Instant::now() + time_limit, Instant::now() + ROUND);
        state.until = state.until.min(until);
        if state.look || until < sooner {
            self.changed.notify_all();
        }
        Ok(None)
    }

    /// Waits until all ranks are registered. Fails when one of them cannot wait any longer, or dies, or the parent group
    /// has failed. Looks at all registered ranks now and then, not at each arrival.
    pub(super) fn gather(&self, plan: &MeetingParams<'_>) -> Result<()> {
        let mut warn_at = plan.started + plan.config.slow_warning.min(plan.config.bounded_timeout());
        let mut state = self.state();
        loop {
            // Checked before anything that they report is used.
            state.check_alive(plan)?;
            if state.missing == 0 {
                return state.check_reach(plan);
            }
            plan.check_parent()?;
            let until = state.until;
            let now = Instant::now();
            if now >= until {
                return Err(plan.failed(state.missing_description(plan)));
            }
            if now >= warn_at {
                tracing::warn!(place = %plan.place, "still waiting: {}", state.missing_description(plan));
                warn_at = now + plan.config.slow_warning.max(ROUND).min(plan.config.bounded_timeout());
            }
            let wait = ROUND.min(until - now);
            let quiet = |state: &mut RosterState| !state.look && state.until == until;
            let waited = self.changed.wait_timeout_while(state, wait, quiet);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns how long all registered ranks wait: they must be told before that why there is no group.
    pub(super) fn until(&self) -> Instant {
        self.state().until
    }

    /// Takes the connections of all registered ranks: rank, connection, and table entry. They stay registered.
    pub(super) fn take_wires(&self) -> Vec<(usize, HandshakeStream, Entry)> {
        let mut state = self.state();
        let ranks = state.ranks.iter_mut().enumerate();
        ranks
            .filter_map(|(rank, registered)| {
                let registered = registered.as_mut()?;
                Some((rank, registered.wire.take()?, registered.entry.clone()))
            })
            .collect()
    }
}

impl RosterState {
    fn missing(&self) -> Vec<usize> {
        (1..self.ranks.len()).filter(|&rank| self.ranks[rank].is_none()).collect()
    }

    /// Checks the registered ranks. While they wait for the table, all they may send is that they give up, as does a rank
    /// that cannot listen.
    fn check_alive(&mut self, plan: &MeetingParams<'_>) -> Result<()> {
        self.look = false;
        let failed = |reason| Error::system("waiting for the ranks", reason);
        let here: Vec<_> =
            self.ranks.iter().flatten().filter_map(|registered| registered.wire.as_ref()).collect();
        let polled: Vec<_> = here.iter().map(|wire| (wire.fd(), PollFlags::IN)).collect();
        let mut ready = wait_any(&polled, Instant::now()).map_err(failed)?.into_iter();
        for (rank, registered) in self.ranks.iter_mut().enumerate() {
            let Some(RegisteredRank { wire: Some(wire), entry, .. }) = registered else { continue };
            if ready.next() == Some(true) || entry.address.port() == 0 {
                return Err(unexpected_message_error(plan, rank, wire, entry));
            }
        }
        Ok(())
    }

    /// Checks that no rank listens on loopback which a rank on another host has to reach.
    fn check_reach(&self, plan: &MeetingParams<'_>) -> Result<()> {
        let own = (plan.bind.get(), None, plan.own.host.as_str());
        let others = self.ranks.iter().flatten().map(|registered| {
            (registered.entry.address.ip(), registered.host_ip, registered.entry.host.as_str())
        });
        let ranks: Vec<_> = std::iter::once(own).chain(others).collect();
        unreachable_pair(&ranks, &plan.members).map_or(Ok(()), |complaint| Err(plan.failed(complaint)))
    }

    fn missing_description(&self, plan: &MeetingParams<'_>) -> String {
        let missing = self.missing();
        let verb = if missing.len() == 1 { "is" } else { "are" };
        let mut text = format!("{} {verb} missing", plan.name(&missing));
        if self.strangers > 0 {
            let count = self.strangers;
            let _ = write!(text, "; {count} connection(s) came without proof of the job's secret and job id");
        }
        if let Some(refused) = &self.refused {
            let _ = write!(text, "; refused: {refused}");
        }
        text
    }
}

/// Builds the table entry of a rank that connects from this address.
pub(super) fn entry(hello: Hello, from: IpAddr) -> Entry {
    let Hello { ip, port, host, pid, site, regroup_port, .. } = hello;
    Entry {
        address: SocketAddr::new(ip.unwrap_or(from), port),
        host: sanitize(&host, MAX_HOST),
        pid,
        site,
        regroup_port,
    }
}

/// Returns the error for a rank that sends something, or closes its connection, while it should only wait.
pub(super) fn unexpected_message_error(
    plan: &MeetingParams<'_>,
    rank: usize,
    wire: &mut HandshakeStream,
    entry: &Entry,
) -> Error {
    match wire.receive(LIMIT, Instant::now() + MESSAGE) {
        Ok(ToLeader::Failed(failure)) => gave_up_error(plan, rank, entry, failure),
        Ok(ToLeader::Connected) => protocol(plan, rank, entry, "it is connected before its time"),
        Err(ConnectError::Closed) => plan.died(rank, entry.host.as_str()),
        Err(fault) => protocol(plan, rank, entry, &fault.to_string()),
    }
}

/// Returns the error for a rank that gives up.
pub(super) fn gave_up_error(plan: &MeetingParams<'_>, rank: usize, entry: &Entry, failure: Failure) -> Error {
    plan.failed_elsewhere(failure.reported_by(plan.number(rank), &entry.host))
}

pub(super) fn protocol(plan: &MeetingParams<'_>, rank: usize, entry: &Entry, detail: &str) -> Error {
    let (rank, host, operation) = (plan.number(rank), entry.host.clone(), plan.operation());
    Error::Protocol { rank, host, operation, detail: detail.into() }
}

/// Describes a rank that listens on loopback while there is a rank on another host, since any rank may have to connect to
/// any other one. `ranks`: where each listens, the address of its host where that is not rank 0's, and the host's name.
fn unreachable_pair(ranks: &[(IpAddr, Option<IpAddr>, &str)], members: &Members) -> Option<String> {
    let local = ranks.iter().enumerate().filter(|(_, (listens, ..))| listens.is_loopback());
    local.into_iter().find_map(|(rank, (listens, host_ip, host))| {
        let (other, (.., name)) = ranks.iter().enumerate().find(|(_, (_, ip, _))| ip != host_ip)?;
        let [rank, other] = [rank, other].map(|rank| members.world_rank(rank));
        Some(format!(
            "rank {rank} (host {host}) listens on {listens}, where rank {other} (host {name}) cannot reach it: set \
             GIRANDOLE_BIND (TcpConfig::bind) on each host to its address in your network"
        ))
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::connection::obstacle::Obstacle;
    use crate::transport::site::Site;

    #[test]
    fn loopback_is_of_no_use_to_another_host() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let unreachable_pair = |ranks: &[_]| unreachable_pair(ranks, &Members::world(ranks.len()));
        let (here, there) = (None, Some(ip("10.0.0.2")));
        let one_host = [(ip("127.0.0.1"), here, "a"), (ip("127.0.0.1"), here, "a")];
        assert_eq!(unreachable_pair(&one_host), None);
        let all_told =
            [(ip("10.0.0.1"), here, "a"), (ip("10.0.0.2"), there, "b"), (ip("10.0.0.2"), there, "b")];
        assert_eq!(unreachable_pair(&all_told), None);
        let last_is_wrong = [(ip("10.0.0.1"), here, "a"), (ip("127.0.0.1"), there, "b")];
        let complaint = unreachable_pair(&last_is_wrong).unwrap();
        assert!(
            complaint.starts_with("rank 1 (host b) listens on 127.0.0.1, where rank 0 (host a)"),
            "{complaint}"
        );
        let wrong = [(ip("10.0.0.1"), here, "a"), (ip("127.0.0.1"), here, "a"), (ip("10.0.0.2"), there, "b")];
        let complaint = unreachable_pair(&wrong).unwrap();
        assert!(
            complaint.contains("rank 1 (host a)") && complaint.contains("rank 2 (host b)"),
            "{complaint}"
        );
        let wrong = [(ip("::1"), here, "a"), (ip("10.0.0.2"), there, "b")];
        assert!(unreachable_pair(&wrong).unwrap().contains("rank 0 (host a) listens on ::1"));
    }

    /// A launcher that reports a rank's death may connect before rank 0 has noticed it.
    #[test]
    fn the_place_of_a_rank_that_has_died_is_not_said_to_be_taken() {
        let until = Instant::now() + Duration::from_secs(60);
        let roster = Roster::new(Members::world(3), "here".into(), Credentials::new(None, ""), until);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let comes = || {
            let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (there, HandshakeStream::new(listener.accept().unwrap().0, None).unwrap())
        };
        let (host, site) = ("a".into(), Site::own(Some(Obstacle::Unwanted)));
        let machine = BuildInfo::own();
        let hello =
            Hello { ip: None, port: 1, host, pid: 7, site, timeout_ms: 60_000, regroup_port: 0, machine };
        let (first, wire) = comes();
        assert!(roster.register(1, wire, hello.clone()).unwrap().is_none());
        let (_second, wire) = comes();
        let (_, reason) = roster.register(1, wire, hello.clone()).unwrap().unwrap();
        assert_eq!(reason, "rank 1 is already here, from host a, pid 7");
        drop(first);
        let is_gone = || roster.state().ranks[1].as_ref().unwrap().wire.as_ref().unwrap().is_readable();
        while !is_gone() {
            assert!(Instant::now() < until);
        }
        let (_third, wire) = comes();
        let third = roster.register(1, wire, hello);
        assert!(matches!(third, Err(ConnectError::NotAwaited)), "{third:?}");
    }
}
