//! Ranks as processes that talk over TCP.

mod elastic;
mod group;
pub(crate) mod links;
pub(crate) mod switchboard;

use std::fmt;
use std::net::{IpAddr, Shutdown};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::base::last_words::FAREWELL;
use crate::base::lock::lock;
use crate::base::members::Members;
use crate::blame::control;
use crate::blame::control::bureau::Bureau;
#[cfg(feature = "nccl")]
use crate::blame::supervisor::Supervisor;
use crate::engine::queue::Engine;
use crate::engine::runner::{Run, Runner};
use crate::rendezvous::meeting::peer::PeerInfo;
use crate::rendezvous::meeting::regroup::Lobby;
use crate::rendezvous::meeting::{Lines, Meeting, meet};
use crate::transport::carrier::Carrier;
use crate::transport::shm;
use crate::{Communicator, ElasticGroup, Error, Operation, Result, Stats, TcpConfig, Topology, Work};

use links::TcpLinks;

/// How often a rank tries again before it sleeps, where every rank of its host has a core: about 30 microseconds.
const SPINS: u32 = 80;

/// One rank of a group of processes, on one host or several: they meet and watch over each other over TCP, and exchange
/// their data through shared memory where they are of one host, over TCP otherwise, see [`Transport`](crate::Transport).
///
/// Dropping it closes the group for this rank, after what is queued is done: the others may go on without it.
///
/// # Cost
/// Connections for data are made when they are first needed, and kept. A group of P ranks holds on each of them one to
/// the rank before and one to the rank after; collectives of small tensors and barriers add those to about 2 log2(P) others,
/// `all_to_all` and the root of a gather or scatter those to all others. Beside them a rank has one control connection to
/// rank 0 (rank 0 has P - 1), one socket that listens and six for its own use.
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
    /// Groups that this rank was the first member of.
    groups: AtomicU64,
    bureau: Arc<Bureau>,
    engine: Option<Engine>,
    control: Mutex<Option<JoinHandle<()>>>,
    lines: Lines,
    /// Where its ranks find each other again, in a group that may change.
    lobby: Option<Arc<Lobby>>,
}

impl Tcp {
    /// Meets the other ranks.
    ///
    /// # Errors
    /// A configuration that cannot be used, [`Error::Listen`], [`Error::NoSecret`], [`Error::Refused`], and
    /// [`Error::Rendezvous`] when not all ranks came in time.
    pub fn connect(config: &TcpConfig) -> Result<Self> {
        match &config.elastic {
            Some(elastic) => elastic::connect(config, elastic),
            None => Self::join(config, meet(config)?, Members::world(config.world_size), None),
        }
    }

    /// A group that has met. What `carrier` takes does not go over its connections.
    pub(crate) fn join(
        config: &TcpConfig,
        meeting: Meeting,
        members: Members,
        carrier: Option<Box<dyn Carrier>>,
    ) -> Result<Self> {
        let Meeting { lines, control, own_ips, job } = meeting;
        let &TcpConfig { rank, world_size, .. } = config;
        let (switchboard, peers) = (&lines.switchboard, lines.switchboard.peers());
        let own = &peers[rank];
        let shares = |other: &usize| *other != rank && own.site.obstacle_to(&peers[*other].site).is_none();
        let shared_memory_ranks: Vec<usize> = (0..world_size).filter(shares).collect();
        let is_near = |peer: &&PeerInfo| peer.host == own.host || own.site.is_at(&peer.site);
        let neighbours = peers.iter().filter(is_near).count();
        let crowded = neighbours > std::thread::available_parallelism().map_or(1, usize::from);
        // The same on all ranks.
        let topology =
            Topology::grouped(world_size, |one, other| peers[one].site.is_near(&peers[other].site));
        let (bureau, ear) = Bureau::new(config, members.clone(), switchboard.clone(), job.clone())?;
        let bureau = Arc::new(bureau);
        job.add(&bureau);
        let thread = if world_size > 1 { Some(control::serve(bureau.clone(), ear, control)?) } else { None };
        let sockets = TcpLinks::new(switchboard.clone(), if crowded { 1 } else { SPINS });
        let runner: Box<dyn Run> = match switchboard.host().filter(|_| !shared_memory_ranks.is_empty()) {
            Some(host) => {
                let links = shm::join(sockets, host.clone(), crowded);
                Box::new(Runner::new(rank, topology, links, bureau.clone()).carried_by(carrier))
            }
            None => Box::new(Runner::new(rank, topology, sockets, bureau.clone()).carried_by(carrier)),
        };
        let engine = Some(Engine::new(rank, world_size, runner, bureau.clone()));
        let (config, groups, control) = (config.clone(), AtomicU64::new(0), Mutex::new(thread));
        Ok(Self {
            rank,
            world_size,
            shared_memory_ranks,
            members,
            config,
            own_ips,
            groups,
            bureau,
            engine,
            control,
            lines,
            lobby: None,
        })
    }

    /// Who looks after the group.
    #[cfg(feature = "nccl")]
    pub(crate) fn supervisor(&self) -> Arc<dyn crate::blame::supervisor::Supervisor> {
        self.bureau.clone()
    }

    /// Why the group has failed, if it has, as the error of something that it was needed for.
    #[cfg(feature = "nccl")]
    pub(crate) fn failure(&self, operation: &str) -> Option<Error> {
        let bureau: &dyn Supervisor = &*self.bureau;
        Some(bureau.error(&bureau.failure()?, operation.into()))
    }

    fn engine(&self) -> Result<&Engine> {
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

    /// With all others data goes over TCP.
    fn shared_memory_ranks(&self) -> &[usize] {
        &self.shared_memory_ranks
    }

    /// Less than what a connection, or a ring in shared memory, has room for.
    fn eager_bytes(&self) -> usize {
        64 << 10
    }

    fn stats(&self) -> Stats {
        self.engine.as_ref().map(Engine::stats).unwrap_or_default()
    }

    fn world_ranks(&self) -> &[usize] {
        self.members.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let (config, meeting, members) = self.meet_group(ranks)?;
        Ok(Arc::new(Self::join(&config, meeting, members, None)?))
    }

    fn elastic(&self) -> Result<&dyn ElasticGroup> {
        Ok(self)
    }

    fn abort(&self) {
        self.engine.iter().for_each(Engine::abort);
        self.bureau.close(true);
        if let Some(thread) = lock(&self.control).take() {
            // The others know that this rank leaves when their connections to it end.
            let _ = thread.join();
        }
        self.lines.switchboard.cut(Shutdown::Both, Some(FAREWELL));
        self.bureau.end_meetings();
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
        // A rank that panics has not left, it has died: the others learn it from the connections that close.
        let died = std::thread::panicking();
        if !died && self.engine.take().is_some_and(Engine::close) {
            self.bureau.say_farewell();
        }
        self.bureau.close(!died);
        if let Some(thread) = lock(&self.control).take() {
            // It never panics, and ends when told to.
            let _ = thread.join();
        }
        self.engine.take();
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tcp(rank {} of {})", self.rank, self.world_size)
    }
}
