//! Rendezvous on all ranks but rank 0.

use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::machine::BuildInfo;
use super::meeting_point::MeetingPoint;
use super::message::{
    Entry, Failure, HELLO_LIMIT, Hello, LIMIT, Table, TableSource, ToLeader, ToMember, milliseconds,
    with_margin,
};
use super::table::{Step, patience};
use super::{BackOff, GroupConnections, Meeting, MeetingParams};
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::handshake::{Credentials, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::{HandshakeStream, parse, wait_any};
use crate::failure::control::failure_state::job::Job;
use crate::transport::peer::PeerInfo;
use crate::{Error, Result};

/// Number of rejections in a row by ranks of some job after which this rank gives up.
const MAX_REJECTIONS: usize = 5;
/// How long to wait for rank 0 to report why another rank is not there any more.
const FAILURE_REPORT_WAIT: Duration = Duration::from_millis(300);
/// How long rank 0 may take to answer after it has closed a connection.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Registers with rank 0, and meets the other ranks.
pub(super) fn join(plan: &MeetingParams<'_>) -> Result<Meeting> {
    let (wire, mut credentials) = find_leader(plan)?;
    plan.bind_to(wire.socket().local_addr().ok().map(|address| address.ip()).into_iter());
    let mut leader = Leader { plan, wire };
    let listening = plan.listen_for_data();
    let hello = hello(plan, listening.as_ref().map_or(0, |(_, port)| *port));
    leader.introduce(&hello, &mut credentials)?;
    let (listener, _) = listening.map_err(|error| leader.give_up(error))?;
    leader.conclude(listener, &credentials)
}

/// Builds the introduction of this rank; `port` is where it accepts data connections.
pub(super) fn hello(plan: &MeetingParams<'_>, port: u16) -> Hello {
    // Rank 0 knows which ranks are missing: it must report them before this rank's own time is over.
    let time_limit = with_margin(plan.deadline.saturating_duration_since(Instant::now()));
    Hello {
        ip: plan.published_ip(),
        port,
        host: plan.own.host.clone(),
        pid: plan.own.pid,
        site: plan.site(),
        timeout_ms: milliseconds(time_limit),
        regroup_port: plan.regroup_port,
        machine: BuildInfo::own(),
    }
}

/// Tries to connect to rank 0 until it is there.
fn find_leader(plan: &MeetingParams<'_>) -> Result<(HandshakeStream, Credentials)> {
    let mut back_off = BackOff::new();
    let mut settled = 0;
    let mut last = LeaderFaults::default();
    let slow_warning =
        plan.config.slow_warning.clamp(Duration::from_millis(100), Duration::from_secs(1 << 25));
    let mut warn_at = plan.started + slow_warning;
    loop {
        let mut faults = match try_leader(plan, plan.limits.handshake)? {
            Ok(found) => return Ok(found),
            Err(faults) => faults,
        };
        plan.check_parent()?;
        let leader = plan.number(0);
        if faults.any(ConnectError::is_out_of_files) {
            return Err(Error::system(format!("looking for rank {leader} at {}", plan.place), faults));
        }
        settled = if faults.any(ConnectError::is_permanent) { settled + 1 } else { 0 };
        let now = Instant::now();
        faults.prefer_earlier(last, plan.deadline);
        let sure = settled >= MAX_REJECTIONS && matches!(plan.place, MeetingPoint::Address { .. });
        if sure || now >= plan.deadline {
            return Err(plan.failed(format!("rank {leader} was not found there: {faults}")));
        }
        if now >= warn_at {
            tracing::warn!(place = %plan.place, "still looking for rank {leader}: {faults}");
            warn_at = now + slow_warning;
        }
        last = faults;
        back_off.pause(plan.deadline);
    }
}

/// Returns the fault of the attempt before where the deadline has cut this one short: it says more.
fn prefer_earlier_fault(fault: ConnectError, last: Option<ConnectError>, deadline: Instant) -> ConnectError {
    match (fault, last) {
        (ConnectError::TimedOut, Some(last)) if Instant::now() >= deadline => last,
        (fault, _) => fault,
    }
}

/// What one attempt at each address of rank 0 has met with. An address is `None` where none was found.
#[derive(Debug, Default)]
struct LeaderFaults(Vec<(Option<SocketAddr>, ConnectError)>);

impl LeaderFaults {
    fn any(&self, is: fn(&ConnectError) -> bool) -> bool {
        self.0.iter().any(|(_, fault)| is(fault))
    }

    /// Takes the faults of the attempt before, where the deadline has cut this one short; see [`prefer_earlier_fault`].
    fn prefer_earlier(&mut self, last: Self, deadline: Instant) {
        let mut last = last.0;
        for (address, fault) in &mut self.0 {
            let earlier = last.iter().position(|(other, _)| other == address);
            let earlier = earlier.map(|at| last.swap_remove(at).1);
            let this = std::mem::replace(fault, ConnectError::Closed);
            *fault = prefer_earlier_fault(this, earlier, deadline);
        }
    }
}

impl fmt::Display for LeaderFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (address, fault)) in self.0.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { "; " })?;
            match address {
                Some(address) if self.0.len() > 1 => write!(f, "{address}: {fault}")?,
                _ => write!(f, "{fault}")?,
            }
        }
        Ok(())
    }
}

/// Tries each address of rank 0 once, for at most `longest` each. The outer error is final.
fn try_leader(
    plan: &MeetingParams<'_>,
    longest: Duration,
) -> Result<std::result::Result<(HandshakeStream, Credentials), LeaderFaults>> {
    let (addresses, credentials) = match plan.find_meeting_point() {
        Ok(found) => found,
        Err(fault) => return Ok(Err(LeaderFaults(vec![(None, fault)]))),
    };
    let mut faults = LeaderFaults::default();
    for (at, &address) in addresses.iter().enumerate() {
        plan.check_secret(address.ip())?;
        // An address at which nothing answers leaves time for the others.
        let now = Instant::now();
        let share = plan.deadline.saturating_duration_since(now) / (addresses.len() - at) as u32;
        let until = now + longest.min(share);
        let connected = HandshakeStream::dial(address, plan.parent_ended(), until).and_then(|mut wire| {
            let verdict = wire.authenticate(&credentials, plan.caller(Purpose::Control), until)?;
            Ok((wire, verdict))
        });
        let fault = match connected {
            Ok((wire, verdict)) if verdict.rank == 0 => {
                check_verdict(plan, verdict)?;
                return Ok(Ok((wire, credentials)));
            }
            Ok((_, verdict)) => ConnectError::OtherRank(verdict.rank),
            Err(fault) => fault,
        };
        faults.0.push((Some(address), fault));
    }
    Ok(Err(faults))
}

fn check_verdict(plan: &MeetingParams<'_>, verdict: Verdict) -> Result<()> {
    let own = plan.config.world_size;
    let reason = match verdict.status {
        HandshakeStatus::Admitted => return Ok(()),
        HandshakeStatus::OtherWorldSize => format!(
            "it was started with world size {own}, the group there has {}; give every rank the same WORLD_SIZE",
            verdict.world_size
        ),
        HandshakeStatus::NotAwaited | HandshakeStatus::Crossed | HandshakeStatus::Gone => {
            "no such rank is expected there".into()
        }
    };
    Err(refused(plan, reason))
}

fn refused(plan: &MeetingParams<'_>, reason: String) -> Error {
    Error::Refused { rank: plan.number(plan.config.rank), address: plan.place.to_string(), reason }
}

/// How long a member waits for other members, once all are registered.
struct Patience {
    began: Instant,
    /// How long rank 0 waits.
    timeout: Duration,
    /// The member's rank, and the number of ranks.
    place: (usize, usize),
    deadline: Instant,
}

impl Patience {
    fn until(&self, step: Step) -> Instant {
        let until = self.began.checked_add(patience(self.timeout, self.place, step));
        until.map_or(self.deadline, |until| until.min(self.deadline))
    }
}

/// A member's connection to rank 0.
pub(super) struct Leader<'a> {
    pub(super) plan: &'a MeetingParams<'a>,
    pub(super) wire: HandshakeStream,
}

impl Leader<'_> {
    /// Introduces this rank, and waits for the answer of rank 0. Where rank 0 closes the connection but can be reached,
    /// this rank introduces itself again; where it cannot be reached, it has died.
    fn introduce(&mut self, hello: &Hello, credentials: &mut Credentials) -> Result<()> {
        let (plan, mut back_off) = (self.plan, BackOff::new());
        loop {
            match self.wire.send(hello, plan.deadline) {
                // A report of failure follows.
                Ok(()) if hello.port == 0 => return Ok(()),
                Ok(()) => {
                    let watched = plan.watch([self.wire.fd()].into_iter());
                    let came = wait_any(&watched, plan.deadline).is_ok_and(|ready| ready[0]);
                    if !came || self.wire.is_open() {
                        return Ok(());
                    }
                }
                Err(ConnectError::Closed) => {}
                Err(fault) => return Err(self.connection_error(fault)),
            }
            let Ok(found) = try_leader(plan, RECONNECT_TIMEOUT.min(plan.limits.handshake))? else {
                // The failure of the parent group may be why.
                plan.check_parent()?;
                return Err(self.connection_error(ConnectError::Closed));
            };
            (self.wire, *credentials) = found;
            back_off.pause(plan.deadline);
        }
    }

    /// Gets the table once all others are registered, and connects.
    pub(super) fn conclude(mut self, listener: TcpListener, credentials: &Credentials) -> Result<Meeting> {
        let plan = self.plan;
        let (frame, table, patience) = self.get_table(credentials)?;
        let peers = self.peers(&table)?;
        let own_ip = peers[plan.config.rank].address.ip();
        let opened = plan.open_data_connections(listener, credentials, table.session, peers, frame);
        let lines = opened.map_err(|error| self.give_up(error))?;
        self.connect_to_previous(plan.config.rank - 1, &lines, patience.until(Step::Neighbour))?;
        self.wait_for_all()?;
        lines.forget_table();

        let mut control: Vec<_> = (0..plan.config.world_size).map(|_| None).collect();
        control[0] = Some(self.wire.into_stream());
        let own_ips = vec![own_ip; plan.config.world_size];
        Ok(Meeting {
            lines,
            control,
            own_ips,
            bind: plan.bind.get(),
            job: Arc::new(Job::new(plan.thread.clone())),
        })
    }

    /// Returns the table, as it was sent and what it says, from rank 0 or from the rank that rank 0 names.
    fn get_table(&mut self, credentials: &Credentials) -> Result<(Vec<u8>, Table, Patience)> {
        let plan = self.plan;
        let limit = (HELLO_LIMIT * (plan.config.world_size + 1)).max(LIMIT);
        let (message, mut frame) = self.receive_framed(limit)?;
        let patience = |timeout_ms| Patience {
            began: Instant::now(),
            timeout: Duration::from_millis(timeout_ms),
            place: (plan.config.rank, plan.config.world_size),
            deadline: plan.deadline,
        };
        // The rank that has sent the table, if that is another than rank 0.
        let mut sender = None;
        let (table, patience) = match message {
            ToMember::Table(table) => {
                let patience = patience(table.timeout_ms);
                (Some(table), patience)
            }
            ToMember::TableAt(source) => {
                let patience = patience(source.timeout_ms);
                let credentials = credentials.bound_to(&source.session);
                plan.check_secret(source.address.ip())?;
                frame = self.fetch_table(&source, &credentials, limit, patience.until(Step::Table))?;
                let same = |table: &Table| table.session == source.session;
                let message = parse::<ToMember>(&frame[4..]);
                let table = message.ok().and_then(|message| match message {
                    ToMember::Table(table) => Some(table).filter(same),
                    _ => None,
                });
                sender = Some(source);
                (table, patience)
            }
            _ => (None, patience(0)),
        };
        match table.filter(|table| table.ranks.len() == plan.config.world_size) {
            Some(table) => Ok((frame, table, patience)),
            None => Err(self.no_table(sender)),
        }
    }

    /// Returns the error for something else than a table, from rank 0 or another `sender`.
    fn no_table(&mut self, sender: Option<TableSource>) -> Error {
        let fault = ConnectError::Malformed("something else than the table of ranks".into());
        let Some(TableSource { rank, host, .. }) = sender else { return self.connection_error(fault) };
        let (rank, operation) = (self.plan.number(rank), self.plan.operation());
        self.give_up(Error::Protocol { rank, host, operation, detail: fault.to_string() })
    }

    /// Fetches the table from the rank that passes it on to this one, as soon as it has it.
    fn fetch_table(
        &mut self,
        source: &TableSource,
        credentials: &Credentials,
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<u8>> {
        let (plan, leader) = (self.plan, self.wire.stream());
        let fetch = || {
            let until = deadline.min(Instant::now() + plan.limits.handshake);
            let mut wire = HandshakeStream::dial(source.address, Some(leader.clone()), until)?;
            let verdict = wire.authenticate(credentials, plan.caller(Purpose::Table), until)?;
            match verdict.status {
                _ if verdict.rank as usize != source.rank => Err(ConnectError::OtherRank(verdict.rank)),
                HandshakeStatus::Admitted => wire.receive_frame(limit, deadline),
                _ => Err(ConnectError::NotAwaited),
            }
        };
        self.reach(source.rank, (&source.host, source.address), deadline, fetch)
    }

    /// Returns all ranks, each with an address at which this one can reach it.
    fn peers(&mut self, table: &Table) -> Result<Vec<PeerInfo>> {
        let mut peers: Vec<PeerInfo> = table.ranks.iter().map(Entry::info).collect();
        for peer in &mut peers {
            if peer.address.ip().is_unspecified() {
                let leader = self.wire.peer().map_err(|fault| self.connection_error(fault))?;
                peer.address.set_ip(leader.ip());
            }
            self.plan.check_secret(peer.address.ip())?;
        }
        Ok(peers)
    }

    /// Connects to the rank before this one, and meanwhile watches for messages of rank 0. So each rank but the last is
    /// reached once: an address that nobody can reach shows during rendezvous, not in the middle of the work.
    fn connect_to_previous(
        &mut self,
        rank: usize,
        lines: &GroupConnections,
        deadline: Instant,
    ) -> Result<()> {
        let PeerInfo { host, address, .. } = lines.data_connections.peer(rank);
        self.reach(rank, (host, *address), deadline, || lines.data_connections.dial(rank, deadline))
    }

    /// Tries to reach another rank, given by its rank, host and address, until `attempt` succeeds; meanwhile watches for
    /// messages of rank 0.
    fn reach<T>(
        &mut self,
        rank: usize,
        (host, address): (&str, SocketAddr),
        deadline: Instant,
        mut attempt: impl FnMut() -> ConnectResult<T>,
    ) -> Result<T> {
        let plan = self.plan;
        let mut back_off = BackOff::new();
        let mut last = None;
        loop {
            let fault = match attempt() {
                Ok(reached) => return Ok(reached),
                Err(fault) => fault,
            };
            let fault = prefer_earlier_fault(fault, last, deadline);
            plan.check_parent().map_err(|error| self.give_up(error))?;
            // It was listening before it was in the table, so a refused connection means that it has ended.
            let gone =
                matches!(&fault, ConnectError::Io(error) if error.kind() == ErrorKind::ConnectionRefused);
            let explained = Instant::now() + if gone { FAILURE_REPORT_WAIT } else { Duration::ZERO };
            if wait_any(&plan.watch([self.wire.fd()].into_iter()), explained).is_ok_and(|ready| ready[0]) {
                self.receive(LIMIT)?;
                return Err(
                    self.connection_error(ConnectError::Malformed("something before its time".into()))
                );
            }
            plan.check_parent().map_err(|error| self.give_up(error))?;
            if rank == 0 && Instant::now() >= deadline && matches!(fault, ConnectError::TimedOut) {
                return Err(self.connection_error(fault));
            }
            let settled = gone || fault.is_out_of_files() || matches!(fault, ConnectError::NoMemory(_));
            if settled || Instant::now() >= deadline {
                let [own, rank] = [plan.config.rank, rank].map(|rank| plan.number(rank));
                let error = plan.failed(format!(
                    "rank {own} (host {}) cannot reach rank {rank} (host {host}) at {address}: {fault}",
                    plan.own.host
                ));
                return Err(self.give_up(error));
            }
            last = Some(fault);
            back_off.pause(deadline);
        }
    }

    /// Reports to rank 0 that this rank is connected, and waits until all are.
    fn wait_for_all(&mut self) -> Result<()> {
        self.plan.agree();
        self.wire
            .send(&ToLeader::Connected, self.plan.deadline)
            .map_err(|fault| self.connection_error(fault))?;
        match self.receive(LIMIT)? {
            ToMember::Complete => Ok(()),
            _ => Err(self.connection_error(ConnectError::Malformed(
                "something else than that all are connected".into(),
            ))),
        }
    }

    /// Receives a message of rank 0; one that ends the meeting is returned as an error.
    fn receive(&mut self, limit: usize) -> Result<ToMember> {
        self.receive_framed(limit).map(|(message, _)| message)
    }

    /// As [`Self::receive`]; returns the message also as it was sent.
    fn receive_framed(&mut self, limit: usize) -> Result<(ToMember, Vec<u8>)> {
        let received = self.wire.receive_frame(limit, self.plan.deadline);
        match received.and_then(|frame| Ok((parse(&frame[4..])?, frame))) {
            Ok((ToMember::Failed(failure), _)) => Err(self.plan.failed_elsewhere(failure)),
            Ok((ToMember::Refused(reason), _)) => Err(refused(self.plan, reason)),
            Ok(received) => Ok(received),
            Err(fault) => Err(self.connection_error(fault)),
        }
    }

    /// Returns the error for a failed connection to rank 0.
    fn connection_error(&mut self, fault: ConnectError) -> Error {
        let host =
            self.wire.peer().map_or_else(|_| self.plan.place.to_string(), |peer| peer.ip().to_string());
        let rank = self.plan.number(0);
        match fault {
            ConnectError::Closed => self.plan.died(0, host),
            // If it were waiting for other ranks, it would have reported them before this rank's time is over.
            ConnectError::TimedOut => {
                let error = Error::Timeout {
                    rank,
                    host,
                    operation: self.plan.operation(),
                    waited: self.plan.started.elapsed(),
                    detail: "it had come, and says nothing any more".into(),
                };
                self.give_up(error)
            }
            ConnectError::Stopped => {
                let known = self.plan.check_parent().err();
                let error = known.unwrap_or_else(|| self.plan.failed(fault.to_string()));
                self.give_up(error)
            }
            fault => {
                Error::Protocol { rank, host, operation: self.plan.operation(), detail: fault.to_string() }
            }
        }
    }

    /// Reports the error to rank 0, so that it can tell the others.
    fn give_up(&mut self, error: Error) -> Error {
        let until = Instant::now() + Duration::from_millis(200);
        if self.wire.send(&ToLeader::Failed(Failure::of(&error)), until).is_ok() {
            self.wire.close_gracefully();
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_address_has_its_own_cause() {
        let now = Instant::now();
        let [first, second] = ["[fd00::1]:9", "10.0.0.1:9"].map(|text| Some(text.parse().unwrap()));
        let refused = || ConnectError::Io(ErrorKind::ConnectionRefused.into());
        let mut faults = LeaderFaults(vec![(first, ConnectError::TimedOut), (second, refused())]);
        assert_eq!(faults.to_string(), "[fd00::1]:9: no answer came; 10.0.0.1:9: connection refused");
        assert!(!faults.any(ConnectError::is_permanent));
        // What the deadline has cut short says less than the attempt before, at the same address.
        let last = vec![(second, ConnectError::NotOurs), (first, ConnectError::BadProof)];
        faults.prefer_earlier(LeaderFaults(last), now);
        let told = "[fd00::1]:9: what listens there could not prove that it belongs to this job; 10.0.0.1:9: connection refused";
        assert_eq!(faults.to_string(), told);
        assert_eq!(
            LeaderFaults(vec![(first, ConnectError::Closed)]).to_string(),
            "the connection was closed"
        );
    }
}
