//! Ranks that an MPI launcher has started, and that talk through its library.

mod carrier;
mod flight;
mod handle;
mod library;
mod meeting;
mod reduce;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::base::fingerprint::digest;
use crate::base::members::Members;
use crate::rendezvous::meeting::{Options, meet_with};
use crate::{Communicator, Operation, Result, Stats, Tcp, TcpConfig, Work};

use carrier::MpiCarrier;
use handle::Handle;

/// Tags that every library has.
const TAGS: u64 = 32_000;

/// One rank of an MPI job: `mpirun -n 4 program`, or `srun --mpi=pmix -n 4 program`.
///
/// MPI moves the data of CPU tensors; all ranks agree on each call before MPI hears of it, and watch over each other, over
/// connections of our own (TCP, and shared memory within a host), since MPI itself would hang, crash or give wrong numbers
/// where ranks disagree, and says nothing of a rank that stands still. MPI is started by the first group and ended with the
/// process, unless that fails; it must grant `MPI_THREAD_MULTIPLE`. f16 and bf16 are reduced in f32, and
/// sent as f32 then: an operation of ours on 16 bits would round after each pair of ranks, and results are rounded once.
/// Sums are the same on every rank; to the last bit they may differ from those of [`Tcp`] with more than two ranks, since
/// libraries add in an order of their own.
///
/// [`Stats`] counts the bytes that the best algorithm would move, since MPI does not tell.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use comm::{Communicator, Mpi, ReduceOp};
///
/// let comm = Mpi::connect(&Mpi::config()?)?;
/// let tensor = Tensor::ones(4, DType::F32, &Device::Cpu)?;
/// comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
/// # Ok::<(), comm::Error>(())
/// ```
pub struct Mpi {
    tcp: Tcp,
    // After the group that uses it.
    comm: Arc<Handle>,
}

impl Mpi {
    /// True where an MPI launcher (`mpirun`, `mpiexec`, `srun --mpi=pmix`) has started this process.
    pub fn is_launched() -> bool {
        library::is_launched()
    }

    /// The library that this program was built with: `Open MPI 4.1.4`.
    pub fn version() -> String {
        library::version()
    }

    /// Starts MPI: rank and number of ranks are what it says, all else is what the environment says, as for
    /// [`TcpConfig::from_env`]. With ranks on several hosts, `GIRANDOLE_BIND` must be set on each.
    ///
    /// # Errors
    /// A library without `MPI_THREAD_MULTIPLE`, or other than that of the launcher; an environment that cannot be used.
    pub fn config() -> Result<TcpConfig> {
        let world = library::start()?;
        TcpConfig::from_env_as(world.rank, world.world_size)
    }

    /// A group of all processes of the job. Every one of them must call it. Place, meeting point and secret are not those of
    /// `config`: the ranks exchange them through MPI.
    ///
    /// # Errors
    /// Those of [`Mpi::config`]; ranks on several hosts that listen on loopback; [`crate::Error::Rendezvous`] when not all
    /// ranks came in time.
    pub fn connect(config: &TcpConfig) -> Result<Self> {
        let library::World { rank, world_size } = library::start()?;
        let deadline = Instant::now() + config.bounded_timeout();
        let comm = Arc::new(Handle::world(deadline)?);
        let given = TcpConfig { rank, world_size, ..config.clone() };
        let (config, listener) = meeting::arrange(given, &comm, deadline)?;
        let meeting = meet_with(&config, Options { listener, ..Options::default() })?;
        Self::join(&config, meeting, Members::world(world_size), comm)
    }

    fn join(
        config: &TcpConfig,
        meeting: crate::rendezvous::meeting::Meeting,
        members: Members,
        comm: Arc<Handle>,
    ) -> Result<Self> {
        let carrier = MpiCarrier::new(comm.clone(), config.rank, config.world_size);
        Ok(Self { tcp: Tcp::join(config, meeting, members, Some(Box::new(carrier)))?, comm })
    }

    /// Called on the members, all at the same place among their operations.
    fn join_group(&self, ranks: &[usize]) -> Result<Self> {
        let (config, meeting, members) = self.tcp.meet_group(ranks)?;
        // All members have met, so all make it now; groups that are made at the same time have other names.
        let name = digest(config.job_id.bytes().map(usize::from));
        let deadline = Instant::now() + config.bounded_timeout();
        let comm = Handle::of(members.world_ranks(), (name % TAGS) as i32, deadline)?;
        Self::join(&config, meeting, members, Arc::new(comm))
    }
}

impl Communicator for Mpi {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn world_size(&self) -> usize {
        self.tcp.world_size()
    }

    fn backend(&self) -> &'static str {
        "mpi"
    }

    fn stats(&self) -> Stats {
        self.tcp.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.tcp.world_ranks()
    }

    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(self.join_group(ranks)?))
    }

    fn abort(&self) {
        self.tcp.abort();
    }

    fn submit(&self, operation: Operation) -> Result<Work> {
        self.tcp.submit(operation)
    }

    fn run(&self, operation: Operation) -> Result<()> {
        self.tcp.run(operation)
    }
}

impl fmt::Debug for Mpi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mpi(rank {} of {}, {:?})", self.rank(), self.world_size(), self.comm)
    }
}
