//! Rendezvous: all ranks connect to rank 0 at the meeting point, each reports where it listens and with whom it could
//! share memory, the table of all ranks goes from rank 0 to all others down a tree, and each rank connects to the one
//! before it. Further connections are made when they are needed (see [`crate::transport::tcp::connections`]).
//!
//! ```text
//! rank r                      rank 0
//!   handshake (control)  ->
//!   Hello                ->   waits until all are here
//!                        <-   Table | TableAt: which rank has it | Refused | Failed
//!   handshake (table) with that rank, which sends Table
//!   handshake (data) with rank r - 1
//!   Connected | Failed   ->   waits until all take connections
//!                        <-   Complete | Failed
//! ```
//!
//! Rank 0 sends the table to a few ranks ([`table`]), each of which passes it on to a few others. Where a rank does not
//! pass it on, those that wait for it report that to rank 0.
//!
//! All ranks connect to rank 0, which keeps these connections to see which rank dies: a star. A tree would have fewer
//! connections at its centre, but would report a death later, through more ranks that may be dead themselves. The star
//! scales far (`MANY_RANKS=1000 cargo test --workspace --test many -- --nocapture` prints what it costs): rank 0 looks only
//! at connections on which something has come, and its limit of open files is what bounds the number of ranks.

mod assembly;
mod data_port;
pub(crate) mod death_announcement;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod leader;
mod machine;
mod meeting_file;
pub(crate) mod meeting_point;
mod member;
mod message;
mod opening;
mod params;
pub(crate) mod parent;
pub(crate) mod preflight;
pub(crate) mod regroup;
mod roster;
mod store;
mod table;
mod text;

use std::cell::Cell;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};

use self::meeting_point::MeetingPoint;
use self::params::{MeetingParams, OwnInfo, own_host};
use self::parent::Parent;
use self::table::Entrance;
use crate::base::members::Members;
use crate::config::launcher_interface::inherited_listener;
use crate::config::scheduler::check_loopback;
use crate::connection::acceptor::{Acceptor, Limits};
use crate::connection::connect_error::ConnectError;
use crate::connection::handshake::Credentials;
use crate::connection::obstacle::Obstacle;
use crate::connection::poll_thread::PollThread;
use crate::connection::stream::Stream;
use crate::failure::control::failure_state::job::Job;
use crate::transport::peer::PeerInfo;
use crate::transport::tcp::connections::DataConnections;
use crate::{Error, InitMethod, Result, TcpConfig, Transport};

/// Result of a rendezvous.
#[derive(Debug)]
pub(crate) struct Meeting {
    pub(crate) lines: GroupConnections,
    /// By rank: on rank 0 one for each other rank, on the others one to rank 0. Non-blocking, with TCP_NODELAY.
    pub(crate) control: Vec<Option<Arc<Stream>>>,
    /// By rank: the address at which that rank reaches this one.
    pub(crate) own_ips: Vec<IpAddr>,
    /// The address on which this rank listens.
    pub(crate) bind: IpAddr,
    /// State shared by the groups of the job in this process.
    pub(crate) job: Arc<Job>,
}

/// A rank's data connections, and the acceptor that takes those of other ranks. Dropping it closes both, in bounded time.
#[derive(Debug)]
pub(crate) struct GroupConnections {
    pub(crate) data_connections: Arc<DataConnections>,
    /// Nonce of the group, which only its ranks know.
    pub(crate) session: [u8; 32],
    /// `None` in a group of one.
    acceptor: Option<(Acceptor, Arc<Entrance>)>,
}

impl GroupConnections {
    /// Forgets the table of ranks, which all others have by now.
    fn forget_table(&self) {
        self.acceptor.iter().for_each(|(_, entrance)| entrance.forget_table());
    }
}

impl Drop for GroupConnections {
    fn drop(&mut self) {
        self.acceptor = None;
        self.data_connections.end();
    }
}

/// Runs the rendezvous. Succeeds on all ranks, once each accepts connections from each, or fails.
pub(crate) fn meet(config: &TcpConfig) -> Result<Meeting> {
    meet_with(config, Options::default())
}

/// Options that only some meetings need.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// The meeting point, already bound; rank 0 only.
    pub(crate) listener: Option<TcpListener>,
    pub(crate) limits: Limits,
    /// The ranks that meet, where these are a subset of a job.
    pub(crate) members: Option<Members>,
    /// The group that these ranks belong to: when it has failed, the meeting fails.
    pub(crate) parent: Option<Parent>,
    /// Port of this rank's listener, where the group may change.
    pub(crate) regroup_port: u16,
    /// That of the parent group, where there is one.
    pub(crate) thread: PollThread,
}

pub(crate) fn meet_with(config: &TcpConfig, options: Options) -> Result<Meeting> {
    config.validate()?;
    let members = options.members.unwrap_or_else(|| Members::world(config.world_size));
    if config.world_size == 1 {
        return meet_alone(config, members);
    }
    let place = MeetingPoint::of(&config.init_method)?;
    let listener = match (options.listener, &config.init_method) {
        (None, InitMethod::Env) if config.rank == 0 => inherited_listener(),
        (given, _) => given,
    };
    let started = Instant::now();
    let plan = MeetingParams {
        config,
        bind: Cell::new(config.bind),
        place,
        limits: options.limits,
        started,
        deadline: started + config.bounded_timeout(),
        own: OwnInfo::new(config.transport),
        credentials: Credentials::of(config)?,
        members,
        parent: options.parent,
        regroup_port: options.regroup_port,
        thread: options.thread,
        agreed: None,
    };
    plan.check_secret(config.bind)?;
    check_loopback(config.bind)?;
    if config.rank == 0 {
        check_files(plan.number(0), config.world_size, getrlimit(Resource::Nofile).current)?;
    }
    match config.rank {
        0 => leader::lead(&plan, listener),
        _ => member::join(&plan),
    }
}

fn meet_alone(config: &TcpConfig, members: Members) -> Result<Meeting> {
    let started = Instant::now();
    let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let plan = MeetingParams {
        config,
        bind: Cell::new(config.bind),
        place: MeetingPoint::Address { host: address.to_string(), port: 0 },
        limits: Limits::default(),
        started,
        deadline: started,
        own: OwnInfo::new(Transport::Tcp),
        credentials: Credentials::of(config)?,
        members,
        parent: None,
        regroup_port: 0,
        thread: PollThread::default(),
        agreed: None,
    };
    let (host, pid, site) = (plan.own.host.clone(), plan.own.pid, plan.site());
    let peers = vec![PeerInfo { host, pid, address: SocketAddr::new(address, 0), site, regroup_port: 0 }];
    let data_connections = Arc::new(DataConnections::new(plan.setup(plan.credentials(), peers))?);
    let lines = GroupConnections { data_connections, session: random_nonce()?, acceptor: None };
    Ok(Meeting { lines, control: vec![None], own_ips: vec![address], bind: config.bind, job: Arc::default() })
}

/// Fails for an address other than loopback where the job has no secret.
fn check_secret(config: &TcpConfig, ip: IpAddr) -> Result<()> {
    match config.secret.is_some() || ip.to_canonical().is_loopback() {
        true => Ok(()),
        false => Err(Error::NoSecret { address: ip.to_string() }),
    }
}

/// Files that rank 0 has open beside its connections to the other ranks: its own, and its connections for data.
const FILES_ASIDE: usize = 64;

/// Fails for a group that is too large for rank 0 to hold a connection to every other rank, where it may have `limit` files
/// open; None for any number.
fn check_files(rank: usize, world_size: usize, limit: Option<u64>) -> Result<()> {
    let room = usize::try_from(limit.unwrap_or(u64::MAX)).unwrap_or(usize::MAX).saturating_sub(FILES_ASIDE);
    // A small group may do with fewer files.
    if world_size <= room.max(FILES_ASIDE) {
        return Ok(());
    }
    let help = format!(
        "rank {rank} holds a connection to every other rank, and may have only {} files open: give at most {room} ranks, or raise \
         the limit there (ulimit -n)",
        room + FILES_ASIDE
    );
    Err(Error::invalid("world size", world_size, help))
}

/// Error for two ranks that must share memory and cannot.
fn shm_unavailable_error(own: usize, rank: usize, host: &str, obstacle: Obstacle) -> Error {
    let help = format!(
        "rank {own} and rank {rank} (host {host}) cannot share memory, because {obstacle}; choose auto or tcp"
    );
    Error::invalid("the transport", Transport::Shm, help)
}

/// Listens on an address of this host.
fn listen(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).map_err(|reason| cannot_listen(address, reason))
}

fn cannot_listen(address: SocketAddr, reason: std::io::Error) -> Error {
    match ConnectError::from(reason) {
        ConnectError::Io(reason) if reason.kind() == ErrorKind::AddrNotAvailable => {
            let help =
                "this host has no such address; give one that it has in the network that connects the ranks";
            Error::invalid("bind (GIRANDOLE_BIND)", address.ip(), help)
        }
        // Another port would not help.
        fault if fault.is_out_of_files() => Error::system(format!("listening on {address}"), fault),
        fault => Error::Listen { address: address.to_string(), reason: fault.to_string() },
    }
}

fn random_nonce() -> Result<[u8; 32]> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(|reason| Error::system("random numbers for a nonce", reason))?;
    Ok(nonce)
}

/// Waits longer and longer between attempts.
struct BackOff(Duration);

impl BackOff {
    fn new() -> Self {
        Self(Duration::from_millis(1))
    }

    fn pause(&mut self, deadline: Instant) {
        std::thread::sleep(self.0.min(deadline.saturating_duration_since(Instant::now())));
        self.0 = (self.0 * 2).min(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
