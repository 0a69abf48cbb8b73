//! Rendezvous on rank 0.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::message::{Entry, Failure, LIMIT, Table, ToLeader, ToMember, milliseconds};
use super::opening::OpenMeetingPoint;
use super::roster::{Roster, gave_up_error, protocol, unexpected_message_error};
use super::{GroupConnections, Meeting, MeetingParams, random_nonce};
use crate::connection::acceptor::Acceptor;
use crate::connection::connect_error::ConnectError;
use crate::connection::handshake::Credentials;
use crate::connection::wire::{HandshakeStream, wait_any};
use crate::failure::control::failure_state::job::Job;
use crate::{Error, Result};

/// How long to try to report to the others that there will be no group.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// By rank, from 1.
pub(super) type Members = Vec<(usize, HandshakeStream, Entry)>;

/// Waits for the other ranks, and makes sure that all are connected.
pub(super) fn lead(plan: &MeetingParams<'_>, given: Option<TcpListener>) -> Result<Meeting> {
    let OpenMeetingPoint { listeners, credentials, _file } = plan.open_meeting_point(given)?;
    let data = (!plan.config.bind_by_route).then(|| plan.listen_for_data()).transpose()?;
    let (members, host) = (plan.members.clone(), plan.own.host.clone());
    let roster = Arc::new(Roster::new(members, host, credentials.clone(), plan.deadline));
    let control = Acceptor::start(listeners, plan.limits, roster.clone(), &plan.thread)?;

    let gathered = roster.gather(plan);
    let mut members = roster.take_wires();
    let met = gathered.and_then(|()| {
        let data = data.map_or_else(|| listen_where_reached(plan, &members), Ok)?;
        connect_group(plan, &mut members, data, &credentials, roster.until(plan))
    });
    let lines = met.inspect_err(|error| {
        report_failure(plan, std::mem::take(&mut members), error);
        // Ranks that are about to introduce themselves must be told too, and those that have done so meanwhile.
        roster.mark_failed(reason(plan, error));
        drop(control);
        report_failure(plan, roster.take_wires(), error);
    })?;
    Ok(into_meeting(plan, lines, members))
}

/// Listens for data on the address at which the members have come.
fn listen_where_reached(plan: &MeetingParams<'_>, members: &Members) -> Result<(TcpListener, u16)> {
    let own_ip = |(_, wire, _): &(usize, HandshakeStream, Entry)| wire.socket().local_addr().ok();
    plan.bind_to(members.iter().filter_map(own_ip).map(|address| address.ip()));
    plan.listen_for_data()
}

/// Sends the table, now that all ranks are registered, and waits until all are connected, no longer than `until`.
pub(super) fn connect_group(
    plan: &MeetingParams<'_>,
    members: &mut Members,
    (listener, port): (TcpListener, u16),
    credentials: &Credentials,
    until: Instant,
) -> Result<GroupConnections> {
    let session = random_nonce()?;
    let address = SocketAddr::new(plan.bind.get(), port);
    let (host, pid, site, regroup_port) =
        (plan.own.host.clone(), plan.own.pid, plan.site(), plan.regroup_port);
    let own = Entry { address, host, pid, site, regroup_port };
    let ranks = std::iter::once(own).chain(members.iter().map(|(.., entry)| entry.clone())).collect();
    let timeout_ms = milliseconds(until.saturating_duration_since(Instant::now()));
    let table = Table { session, timeout_ms, ranks };
    let peers = table.ranks.iter().map(Entry::info).collect();
    let lines = plan.open_data_connections(listener, credentials, session, peers)?;
    connect_all(plan, members, table, until)?;
    Ok(lines)
}

/// Turns the members' connections into control connections.
pub(super) fn into_meeting(plan: &MeetingParams<'_>, lines: GroupConnections, members: Members) -> Meeting {
    let mut control = vec![None];
    control.extend(members.into_iter().map(|(_, wire, _)| Some(wire.into_stream())));
    let own_ips = control.iter().map(|stream| plan.own_ip(stream.as_ref(), plan.bind.get())).collect();
    Meeting { lines, control, own_ips, bind: plan.bind.get(), job: Arc::new(Job::new(plan.thread.clone())) }
}

/// Sends the table to all ranks, and waits until all are connected.
fn connect_all(plan: &MeetingParams<'_>, members: &mut Members, table: Table, until: Instant) -> Result<()> {
    send_all(plan, members, &ToMember::Table(table), false)?;
    let mut connected = vec![false; members.len()];
    while connected.contains(&false) {
        let fds = plan.watch(members.iter().map(|(_, wire, _)| wire.fd()));
        let ready = wait_any(&fds, until).map_err(|reason| Error::system("waiting for the ranks", reason))?;
        if !ready.contains(&true) {
            let late: Vec<usize> =
                (1..).zip(&connected).filter(|(_, done)| !**done).map(|(rank, _)| rank).collect();
            // A rank after one that is late waits for it, so only the first of them is named.
            let first = late.iter().copied().filter(|rank| !late.contains(&(rank - 1)));
            // A rank that cannot connect would have reported that by now.
            let late = plan.name(&first.collect::<Vec<_>>());
            return Err(plan.failed(format!("all ranks are here, but nothing is heard of {late} any more")));
        }
        // A rank that has died explains what others report.
        if let Some((rank, _, entry)) = members.iter().find(|(_, wire, _)| !wire.is_open()) {
            return Err(plan.died(*rank, entry.host.as_str()));
        }
        plan.check_parent()?;
        for (((rank, wire, entry), connected), _) in
            members.iter_mut().zip(&mut connected).zip(&ready).filter(|(_, ready)| **ready)
        {
            if *connected {
                return Err(unexpected_message_error(plan, *rank, wire, entry));
            }
            *connected = receive_connected(plan, *rank, wire, entry)?;
        }
    }
    plan.agree();
    send_all(plan, members, &ToMember::Complete, true)
}

/// Returns true when the rank reports that it is connected.
fn receive_connected(
    plan: &MeetingParams<'_>,
    rank: usize,
    wire: &mut HandshakeStream,
    entry: &Entry,
) -> Result<bool> {
    match wire.receive(LIMIT, plan.deadline) {
        Ok(ToLeader::Connected) => Ok(true),
        Ok(ToLeader::Failed(failure)) => Err(gave_up_error(plan, rank, entry, failure)),
        Err(ConnectError::Closed) => Err(plan.died(rank, entry.host.as_str())),
        Err(fault) => Err(protocol(plan, rank, entry, &fault.to_string())),
    }
}

/// Sends a message to all members. With `may_be_dead`, after all have met, one that is dead is no error: its loss is
/// detected like any later one, and the others are still told.
fn send_all(
    plan: &MeetingParams<'_>,
    members: &mut Members,
    message: &ToMember,
    may_be_dead: bool,
) -> Result<()> {
    let message =
        HandshakeStream::frame(message).map_err(|fault| Error::system("the table of ranks", fault))?;
    members.iter_mut().try_for_each(|(rank, wire, entry)| match wire.write(&message, plan.deadline) {
        Ok(()) => Ok(()),
        Err(ConnectError::Closed) if may_be_dead => Ok(()),
        Err(ConnectError::Closed) => Err(plan.died(*rank, entry.host.as_str())),
        Err(fault) => {
            let (rank, host) = (plan.number(*rank), &entry.host);
            Err(plan.failed(format!("nothing can be sent to rank {rank} (host {host}): {fault}")))
        }
    })
}

/// Reports to the members that there will be no group, and why.
pub(super) fn report_failure(plan: &MeetingParams<'_>, members: Members, error: &Error) {
    let (until, failure) = (Instant::now() + FAILURE_REPORT_TIMEOUT, reason(plan, error));
    for (_, mut wire, _) in members {
        if wire.send(&ToMember::Failed(failure.clone()), until).is_ok() {
            wire.close_gracefully();
        }
    }
}

/// Returns the failure that is reported to the others.
fn reason(plan: &MeetingParams<'_>, error: &Error) -> Failure {
    let failure = Failure::of(error);
    match error {
        // These errors name no rank: they are this one's own.
        Error::System { .. } | Error::Listen { .. } | Error::Aborted { .. } => {
            failure.reported_by(plan.number(0), &plan.own.host)
        }
        _ => failure,
    }
}
