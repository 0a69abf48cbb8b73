//! Rendezvous on rank 0.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::assembly::{Assembly, TableMessages};
use super::message::{Entry, Failure, LIMIT, Table, ToLeader, ToMember, milliseconds};
use super::opening::OpenMeetingPoint;
use super::roster::{Roster, gave_up_error, protocol, unexpected_message_error};
use super::{GroupConnections, Meeting, MeetingParams, random_nonce};
use crate::connection::acceptor::Acceptor;
use crate::connection::connect_error::ConnectError;
use crate::connection::handshake::Credentials;
use crate::connection::wire::{HandshakeStream, wait_any};
use crate::failure::control::failure_state::job::Job;
use crate::platform::ReadySet;
use crate::{Error, Result};

/// How long to try to report to the others that there will be no group.
const FAILURE_REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// The least time from one warning to the next.
const LEAST_PAUSE: Duration = Duration::from_millis(100);

/// Where more ranks than that are not connected yet, rank 0 lets reports come in for a moment before it looks at them: each time it
/// wakes costs more than a report.
const MANY: usize = 64;
const BATCH: Duration = Duration::from_millis(2);

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
        connect_group(plan, &mut members, data, &credentials, roster.until())
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
    let lines = plan.open_data_connections(listener, credentials, session, peers, Vec::new())?;
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

/// Sends the table on its way to all ranks, and waits until all are connected. Looks only at ranks that have sent something.
fn connect_all(plan: &MeetingParams<'_>, members: &mut Members, table: Table, until: Instant) -> Result<()> {
    let failed = |reason: Errno| Error::system("waiting for the ranks", ConnectError::from(reason));
    let mut waits = ReadySet::new().map_err(failed)?;
    for (at, (_, wire, _)) in members.iter().enumerate() {
        waits.insert(at, wire.stream(), PollFlags::IN).map_err(failed)?;
    }
    let mut costs = send_table(plan, members, table, until)?;
    let pause = plan.config.slow_warning.min(plan.config.bounded_timeout());
    let mut warn_at = Instant::now() + pause;
    let mut assembly = Assembly::new(members.len() + 1);
    while !assembly.is_complete() {
        let fds = plan.watch(waits.fds().map(|(fd, _)| fd));
        let wait_until = until.min(warn_at);
        let woken =
            wait_any(&fds, wait_until).map_err(|reason| Error::system("waiting for the ranks", reason))?;
        if !woken.contains(&true) && wait_until < until {
            let late = plan.name(&assembly.late());
            tracing::warn!(place = %plan.place, "still waiting: all ranks are here, and nothing is heard of {late} any more");
            warn_at = Instant::now() + pause.max(LEAST_PAUSE);
            continue;
        }
        if !woken.contains(&true) {
            // A rank that cannot connect would have reported that by now.
            let late = plan.name(&assembly.late());
            return Err(plan.failed(format!("all ranks are here, but nothing is heard of {late} any more")));
        }
        plan.check_parent()?;
        if assembly.missing() > MANY {
            std::thread::sleep(BATCH);
        }
        let ready = waits.ready().map_err(failed)?;
        costs.wake_ups += 1;
        costs.looks += ready.len();
        for &at in &ready {
            let (rank, wire, entry) = &mut members[at];
            let received = match assembly.is_connected(*rank) {
                true => Err(unexpected_message_error(plan, *rank, wire, entry)),
                false => receive_connected(plan, *rank, wire, entry),
            };
            if let Err(error) = received {
                // A rank that has died explains what others report.
                let dead = ready.iter().find(|other| **other != at && !members[**other].1.is_open());
                return Err(
                    dead.map_or(error, |dead| plan.died(members[*dead].0, members[*dead].2.host.as_str()))
                );
            }
            assembly.connect(members[at].0);
        }
    }
    plan.agree();
    let complete = frame(&ToMember::Complete)?;
    costs.bytes += complete.len() * members.len();
    let told = members.iter_mut().try_for_each(|member| send(plan, member, (&complete, plan.deadline), true));
    costs.log(members.len() + 1);
    told
}

/// What a meeting has cost rank 0 since all were registered.
#[derive(Default)]
struct Costs {
    /// Sent to the other ranks.
    bytes: usize,
    wake_ups: usize,
    /// At connections.
    looks: usize,
}

impl Costs {
    fn log(&self, ranks: usize) {
        let Self { bytes, wake_ups, looks } = self;
        tracing::debug!(ranks, bytes, wake_ups, looks, "rank 0 has brought all ranks together");
    }
}

/// Receives a rank's report that it is connected.
fn receive_connected(
    plan: &MeetingParams<'_>,
    rank: usize,
    wire: &mut HandshakeStream,
    entry: &Entry,
) -> Result<()> {
    match wire.receive(LIMIT, plan.deadline) {
        Ok(ToLeader::Connected) => Ok(()),
        Ok(ToLeader::Failed(failure)) => Err(gave_up_error(plan, rank, entry, failure)),
        Err(ConnectError::Closed) => Err(plan.died(rank, entry.host.as_str())),
        Err(fault) => Err(protocol(plan, rank, entry, &fault.to_string())),
    }
}

/// Sends the table to the ranks that get it from this one, and to the others from which rank they get it.
fn send_table(
    plan: &MeetingParams<'_>,
    members: &mut Members,
    table: Table,
    until: Instant,
) -> Result<Costs> {
    let failed = |fault| Error::system("the table of ranks", fault);
    let messages = TableMessages::new(table).map_err(failed)?;
    let mut costs = Costs::default();
    for member in members {
        let message = messages.to(member.0).map_err(failed)?;
        costs.bytes += message.len();
        send(plan, member, (&message, until), false)?;
    }
    Ok(costs)
}

fn frame(message: &ToMember) -> Result<Vec<u8>> {
    HandshakeStream::frame(message).map_err(|fault| Error::system("the table of ranks", fault))
}

/// Sends a message to a member. With `may_be_dead`, after all have met, one that is dead is no error: its loss is detected
/// like any later one, and the others are still told.
fn send(
    plan: &MeetingParams<'_>,
    (rank, wire, entry): &mut (usize, HandshakeStream, Entry),
    (message, until): (&[u8], Instant),
    may_be_dead: bool,
) -> Result<()> {
    match wire.write(message, until) {
        Ok(()) => Ok(()),
        Err(ConnectError::Closed) if may_be_dead => Ok(()),
        Err(ConnectError::Closed) => Err(plan.died(*rank, entry.host.as_str())),
        Err(fault) => {
            let (rank, host) = (plan.number(*rank), &entry.host);
            Err(plan.failed(format!("nothing can be sent to rank {rank} (host {host}): {fault}")))
        }
    }
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
