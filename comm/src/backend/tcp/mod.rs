//! Ranks as processes that communicate over TCP, and through shared memory within a host.

mod elastic;
mod group;

use std::fmt;
use std::net::{IpAddr, Shutdown};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use crate::backend::subgroups::Subgroups;
use crate::base::last_message::GOODBYE;
use crate::base::lock;
use crate::base::members::Members;
use crate::connection::poll_thread::Served;
use crate::engine::queue::OperationQueue;
use crate::engine::runner::{OperationRunner, Run};
use crate::failure::control;
use crate::failure::control::failure_state::FailureState;
use crate::failure::peer_failures;
#[cfg(feature = "nccl")]
use crate::failure::supervisor::Supervisor;
use crate::rendezvous::regroup::RegroupEndpoint;
use crate::rendezvous::{GroupConnections, Meeting, meet};
use crate::transport::carrier::Carrier;
use crate::transport::hybrid_links::HybridLinks;
use crate::transport::peer::PeerInfo;
use crate::transport::tcp::links::TcpLinks;
use crate::{Communicator, ElasticGroup, Error, Operation, Result, Stats, TcpConfig, Topology, Work};

/// How often a rank retries before it sleeps, where every rank of its host has a core: about 30 microseconds.
const SPINS: u32 = 80;

/// One rank of a group of processes, on one host or several. The ranks find each other and detect failures over TCP, and
/// exchange their data through shared memory within a host, over TCP otherwise, see [`Transport`](crate::Transport).
///
/// Dropping it closes the group for this rank, once the queued operations are done. The other ranks may continue without
/// it.
///
/// # Cost
/// Data connections are made when they are first needed, and kept. In a group of P ranks, each rank holds one to the
/// previous and one to the next rank; collectives of small tensors and barriers add connections to about 2 log2(P) other
/// ranks, `all_to_all` and the root of a gather or scatter connections to all other ranks. In addition, a rank has one
/// control connection to rank 0 (rank 0 has P - 1), one listening socket and six sockets for internal use.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use comm::{Communicator, ReduceOp, Tcp, TcpConfig};
///
/// // RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as every launcher sets them.
/// let comm = Tcp::connect(&TcpConfig::from_env()?)?;
/// let tensor = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
/// # Ok::<(), comm::Error>(())
/// ```
pub struct Tcp {
    rank: usize,
    world_size: usize,
    shared_memory_ranks: Vec<usize>,
    members: Members,
    config: TcpConfig,
    /// By rank: the address at which that rank reaches this one.
    own_ips: Vec<IpAddr>,
    /// Number of groups of which this rank was the first member.
    groups: AtomicU64,
    failure_state: Arc<FailureState>,
    engine: Option<OperationQueue>,
    control: Mutex<Option<Served>>,
    lines: GroupConnections,
    /// For regrouping, in a group that may change; otherwise None.
    endpoint: Option<Arc<RegroupEndpoint>>,
    subgroups: Subgroups,
}

impl Tcp {
    /// Joins the group: waits until all other ranks have come.
    ///
    /// # Errors
    /// A configuration that cannot be used, [`Error::Listen`], [`Error::NoSecret`], [`Error::Refused`], and
    /// [`Error::Rendezvous`] when not all ranks came in time.
    pub fn connect(config: &TcpConfig) -> Result<Self> {
        let connected = match &config.elastic {
            Some(elastic) => elastic::connect(config, elastic),
            None => {
                meet(config).and_then(|met| Self::join(config, met, Members::world(config.world_size), None))
            }
        };
        connected.inspect_err(peer_failures::record)
    }

    /// Builds the group of ranks that have found each other. Operations that `carrier` takes send no data over its
    /// connections.
    pub(crate) fn join(
        config: &TcpConfig,
        meeting: Meeting,
        members: Members,
        carrier: Option<Box<dyn Carrier>>,
    ) -> Result<Self> {
        let Meeting { lines, control, own_ips, bind, job } = meeting;
        let &TcpConfig { rank, world_size, .. } = config;
        let (data_connections, peers) = (&lines.data_connections, lines.data_connections.peers());
        let own = &peers[rank];
        let shares = |other: &usize| *other != rank && own.site.obstacle_to(&peers[*other].site).is_none();
        let shared_memory_ranks: Vec<usize> = (0..world_size).filter(shares).collect();
        let is_near = |peer: &&PeerInfo| peer.host == own.host || own.site.is_same_machine(&peer.site);
        let neighbours = peers.iter().filter(is_near).count();
        let crowded = neighbours > std::thread::available_parallelism().map_or(1, usize::from);
        // These are the same on all ranks.
        let all_share = peers.iter().all(|peer| peers[0].site.obstacle_to(&peer.site).is_none());
        let topology =
            Topology::grouped(world_size, |one, other| peers[one].site.is_same_network(&peers[other].site))
                .sharing_memory(all_share);
        let failure_state = FailureState::new(config, members.clone(), data_connections.clone(), job.clone());
        let failure_state = Arc::new(failure_state);
        job.add(&failure_state);
        let served = (world_size > 1).then(|| control::serve(failure_state.clone(), control)).transpose()?;
        let sockets = TcpLinks::new(data_connections.clone(), if crowded { 1 } else { SPINS });
        let runner: Box<dyn Run> = match data_connections.host().filter(|_| !shared_memory_ranks.is_empty()) {
            Some(host) => {
                let links = HybridLinks::new(sockets, host.wake_up.clone(), crowded);
                Box::new(
                    OperationRunner::new(rank, topology, links, failure_state.clone()).carried_by(carrier),
                )
            }
            None => Box::new(
                OperationRunner::new(rank, topology, sockets, failure_state.clone()).carried_by(carrier),
            ),
        };
        let engine = Some(OperationQueue::new(rank, world_size, runner, failure_state.clone()));
        let config = TcpConfig { bind, bind_by_route: false, ..config.clone() };
        let (groups, control) = (AtomicU64::new(0), Mutex::new(served));
        Ok(Self {
            rank,
            world_size,
            shared_memory_ranks,
            members,
            config,
            own_ips,
            groups,
            failure_state,
            engine,
            control,
            lines,
            endpoint: None,
            subgroups: Subgroups::default(),
        })
    }

    /// Returns the group's supervisor, which detects failures and tells all ranks.
    #[cfg(feature = "nccl")]
    pub(crate) fn supervisor(&self) -> Arc<dyn crate::failure::supervisor::Supervisor> {
        self.failure_state.clone()
    }

    /// Returns the error of `operation` that needed this group, if the group has failed; otherwise None.
    #[cfg(feature = "nccl")]
    pub(crate) fn failure(&self, operation: &str) -> Option<Error> {
        let failure_state: &dyn Supervisor = &*self.failure_state;
        Some(failure_state.error(&failure_state.failure()?, operation.into()))
    }

    fn engine(&self) -> Result<&OperationQueue> {
        self.engine.as_ref().ok_or_else(|| Error::system("group", "it is closed"))
    }
}

impl Communicator for Tcp {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn backend(&self) -> &'static str {
        "tcp"
    }

    /// Data to all other ranks goes over TCP.
    fn shared_memory_ranks(&self) -> &[usize] {
        &self.shared_memory_ranks
    }

    /// Less than a connection, or a ring in shared memory, can hold.
    fn eager_bytes(&self) -> usize {
        64 << 10
    }

    fn stats(&self) -> Stats {
        self.engine.as_ref().map(OperationQueue::stats).unwrap_or_default()
    }

    fn world_ranks(&self) -> &[usize] {
        self.members.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let (config, meeting, members) = self.rendezvous(ranks)?;
        let mut group = Self::join(&config, meeting, members, None)?;
        group.subgroups = self.subgroups.clone();
        Ok(self.subgroups.add(group))
    }

    fn elastic(&self) -> Result<&dyn ElasticGroup> {
        Ok(self)
    }

    fn abort(&self) {
        self.engine.iter().for_each(OperationQueue::abort);
        self.failure_state.close(true);
        // The goodbye must reach the others before their data connections to this rank end.
        let control = lock(&self.control).take();
        control.into_iter().for_each(Served::wait);
        self.lines.data_connections.shutdown(Shutdown::Both, Some(GOODBYE));
        self.failure_state.cancel_formations();
    }

    fn announce_failure(&self, reason: &str) {
        self.failure_state.announce_failure(reason);
    }

    fn submit(&self, operation: Operation) -> Result<Work> {
        self.engine()?.submit(operation).map(Work::new)
    }

    fn run(&self, operation: Operation) -> Result<()> {
        self.engine()?.run(operation)
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        // A rank that panics counts as dead, not as having left: the others detect it by the connections that close.
        let died = std::thread::panicking();
        if !died && self.engine.take().is_some_and(OperationQueue::close) {
            self.failure_state.notify_leaving();
        }
        self.failure_state.close(!died);
        let control = lock(&self.control).take();
        control.into_iter().for_each(Served::wait);
        self.engine.take();
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp(rank {} of {})", self.rank, self.world_size)
    }
}
