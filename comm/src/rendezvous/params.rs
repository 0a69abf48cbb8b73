//! Parameters of one rank in a rendezvous, and the steps that all ranks have in common.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::PollFlags;

use super::data_port::DataPort;
use super::meeting_point::MeetingPoint;
use super::message::{Failure, MAX_HOST};
use super::parent::Parent;
use super::table::Entrance;
use super::text::{name_ranks, sanitize};
use super::{GroupConnections, check_secret, shm_unavailable_error};
use crate::base::members::Members;
use crate::connection::acceptor::{Acceptor, Limits};
use crate::connection::handshake::{ClientClaim, Credentials, Purpose};
use crate::connection::obstacle::Obstacle;
use crate::connection::poll_thread::PollThread;
use crate::connection::stream::Stream;
use crate::connection::wire::Stop;
use crate::platform::host_name;
use crate::transport::peer::PeerInfo;
use crate::transport::shm::SharedMemory;
use crate::transport::site::Site;
use crate::transport::tcp::connections::{DataConnections, Setup};
use crate::{Error, Result, TcpConfig, Transport};

/// What a rank reports of itself.
pub(super) struct OwnInfo {
    pub(super) host: String,
    pub(super) pid: u32,
    /// Handle for sharing memory, or why this rank shares none.
    pub(super) memory: std::result::Result<SharedMemory, Obstacle>,
}

/// Returns the name of this host.
pub(super) fn own_host() -> String {
    sanitize(&host_name(), MAX_HOST)
}

impl OwnInfo {
    pub(super) fn new(transport: Transport) -> Self {
        let memory = match transport {
            Transport::Tcp => Err(Obstacle::Unwanted),
            Transport::Auto | Transport::Shm => SharedMemory::open(),
        };
        Self { host: own_host(), pid: std::process::id(), memory }
    }
}

/// Parameters of one rank in a rendezvous.
pub(super) struct MeetingParams<'a> {
    pub(super) config: &'a TcpConfig,
    /// The address on which this rank listens for data; see [`TcpConfig::bind_by_route`].
    pub(super) bind: Cell<IpAddr>,
    pub(super) place: MeetingPoint,
    pub(super) limits: Limits,
    pub(super) started: Instant,
    pub(super) deadline: Instant,
    pub(super) own: OwnInfo,
    pub(super) credentials: Credentials,
    pub(super) members: Members,
    pub(super) parent: Option<Parent>,
    pub(super) regroup_port: u16,
    /// Serves the listeners, and later the control connections.
    pub(super) thread: PollThread,
    /// Called on a member before it reports to the leader that it is connected, and on the leader before it reports to
    /// anyone that all are.
    pub(super) agreed: Option<&'a dyn Fn()>,
}

impl MeetingParams<'_> {
    /// Called when other ranks may complete the meeting from now on.
    pub(super) fn agree(&self) {
        if let Some(agreed) = self.agreed {
            agreed();
        }
    }

    /// Returns the world rank of a rank of this group.
    pub(super) fn number(&self, rank: usize) -> usize {
        self.members.world_rank(rank)
    }

    /// Formats ranks of this group for errors, by their world ranks.
    pub(super) fn name(&self, ranks: &[usize]) -> String {
        name_ranks(&ranks.iter().map(|rank| self.number(*rank)).collect::<Vec<_>>())
    }

    /// Name of the rendezvous in errors.
    pub(super) fn operation(&self) -> String {
        "rendezvous".to_string() + &self.members.suffix()
    }

    /// Fails where the parent group has failed or was aborted: not all members of the new group will come.
    pub(super) fn check_parent(&self) -> Result<()> {
        self.parent.as_ref().and_then(|parent| parent.failure(self.operation())).map_or(Ok(()), Err)
    }

    /// Returns the stream that becomes readable when the parent group has failed or was aborted.
    pub(super) fn parent_ended(&self) -> Option<Arc<dyn Stop>> {
        self.parent.as_ref().map(|parent| parent.ended.clone() as Arc<dyn Stop>)
    }

    /// Returns what to poll: these connections, and the end of the parent group.
    pub(super) fn watch<'a>(
        &'a self,
        fds: impl Iterator<Item = BorrowedFd<'a>>,
    ) -> Vec<(BorrowedFd<'a>, PollFlags)> {
        fds.chain(self.parent.iter().map(|parent| parent.ended.as_fd()))
            .map(|fd| (fd, PollFlags::IN))
            .collect()
    }

    /// Fails for an address other than loopback where the job has no secret.
    pub(super) fn check_secret(&self, ip: IpAddr) -> Result<()> {
        check_secret(self.config, ip)
    }

    pub(super) fn credentials(&self) -> Credentials {
        self.credentials.clone()
    }

    /// Returns the number of ranks.
    pub(super) fn world_size(&self) -> u32 {
        self.config.world_size as u32
    }

    pub(super) fn rank(&self) -> u32 {
        self.config.rank as u32
    }

    pub(super) fn caller(&self, purpose: Purpose) -> ClientClaim {
        ClientClaim { rank: self.rank(), world_size: self.world_size(), purpose }
    }

    pub(super) fn site(&self) -> Site {
        Site::own(self.own.memory.as_ref().err().copied())
    }

    pub(super) fn setup(&self, credentials: Credentials, peers: Vec<PeerInfo>) -> Setup {
        Setup {
            own: self.caller(Purpose::Data),
            credentials,
            peers: Arc::new(peers),
            host: self.own.memory.clone().ok(),
            transport: self.config.transport,
            handshake: self.limits.handshake,
            timeout: self.config.bounded_timeout(),
        }
    }

    /// Accepts data connections from now on, and those of ranks that fetch the table from this one (`table`: as it was
    /// received). Fails where all data connections must be shared memory, and one of this rank's cannot be.
    pub(super) fn open_data_connections(
        &self,
        listener: TcpListener,
        credentials: &Credentials,
        session: [u8; 32],
        peers: Vec<PeerInfo>,
        table: Vec<u8>,
    ) -> Result<GroupConnections> {
        let own = self.config.rank;
        if self.config.transport == Transport::Shm {
            for (rank, peer) in peers.iter().enumerate().filter(|(rank, _)| *rank != own) {
                if let Some(obstacle) = peers[own].site.obstacle_to(&peer.site) {
                    return Err(shm_unavailable_error(
                        self.number(own),
                        self.number(rank),
                        &peer.host,
                        obstacle,
                    ));
                }
            }
        }
        let credentials = credentials.bound_to(&session);
        let data_connections = Arc::new(DataConnections::new(self.setup(credentials, peers))?);
        let entrance = Arc::new(Entrance::new(
            self.caller(Purpose::Table),
            data_connections.clone(),
            table,
            self.deadline,
        ));
        let acceptor = Acceptor::start(vec![listener], self.limits, entrance.clone(), &self.thread)?;
        Ok(GroupConnections { data_connections, session, acceptor: Some((acceptor, entrance)) })
    }

    /// Returns the address at which other ranks reach this one: the local address of `stream`, where this rank `listens`
    /// on all addresses of its host.
    pub(super) fn own_ip(&self, stream: Option<&Arc<Stream>>, listens: IpAddr) -> IpAddr {
        match stream.and_then(|stream| stream.socket().local_addr().ok()) {
            Some(address) if listens.is_unspecified() => address.ip(),
            _ => listens,
        }
    }

    /// Takes the address over which this rank and rank 0 have reached each other as the one to listen on, where the
    /// configuration leaves that open. `reached`: that of each connection, on this side.
    pub(super) fn bind_to(&self, reached: impl Iterator<Item = IpAddr>) {
        if !self.config.bind_by_route {
            return;
        }
        let reached: Vec<IpAddr> = reached.collect();
        let times = |ip: &&IpAddr| reached.iter().filter(|other| other == ip).count();
        if let Some(&most) = reached.iter().rev().max_by_key(times) {
            self.bind.set(most);
        }
    }

    /// Opens the listener for data connections.
    pub(super) fn listen_for_data(&self) -> Result<(TcpListener, u16)> {
        let port = self.reserve_data_port()?;
        let number = port.number();
        Ok((port.listen()?, number))
    }

    /// Reserves a port for data connections.
    pub(super) fn reserve_data_port(&self) -> Result<DataPort> {
        DataPort::reserve(SocketAddr::new(self.bind.get(), 0))
    }

    /// Returns the address that others should use; `None` where this rank listens on all addresses of its host.
    pub(super) fn published_ip(&self) -> Option<IpAddr> {
        Some(self.bind.get()).filter(|ip| !ip.is_unspecified())
    }

    /// Returns the error of a meeting that has failed for a reason that is neither this rank's nor another one's alone.
    pub(super) fn failed(&self, detail: impl Into<String>) -> Error {
        self.failed_after(self.started.elapsed(), detail)
    }

    pub(super) fn failed_after(&self, waited: Duration, detail: impl Into<String>) -> Error {
        Error::Rendezvous {
            rank: self.number(self.config.rank),
            world_size: self.config.world_size,
            address: self.place.to_string(),
            waited,
            detail: detail.into(),
        }
    }

    pub(super) fn died(&self, rank: usize, host: impl Into<String>) -> Error {
        Error::PeerDied { rank: self.number(rank), host: host.into(), operation: self.operation() }
    }

    /// Returns the error for a failure that another rank has reported.
    pub(super) fn failed_elsewhere(&self, failure: Failure) -> Error {
        match failure.died {
            Some((rank, host)) => Error::PeerDied { rank, host, operation: self.operation() },
            // This rank may have come long after the others began to wait.
            None => {
                let waited = self.started.elapsed().max(Duration::from_millis(failure.waited_ms));
                self.failed_after(waited, failure.detail)
            }
        }
    }
}
