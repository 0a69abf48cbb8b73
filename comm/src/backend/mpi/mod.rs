//! MPI backend: ranks started by an MPI launcher, whose data the MPI library moves.

mod carrier;
mod handle;
mod library;
mod meeting;
mod pending_call;
mod reduce;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::base::fingerprint::digest;
use crate::base::members::Members;
use crate::rendezvous::{Options, meet_with};
use crate::{Communicator, Operation, Result, Stats, Tcp, TcpConfig, Work};

use carrier::MpiCarrier;
use handle::MpiHandle;

/// Number of tags used: no more than every MPI library has.
const TAGS: u64 = 32_000;

/// One rank of an MPI job: `mpirun -n 4 program`, or `srun --mpi=pmix -n 4 program`.
///
/// MPI moves the data of CPU tensors. All ranks agree on each call before MPI is called, and detect failed ranks, over
/// connections of our own (TCP, and shared memory within a host), since MPI itself would hang, crash or give wrong
/// numbers where ranks disagree, and does not report a rank that is stuck. MPI is started by the first group and
/// finalized when the process exits, unless the process fails; it must grant `MPI_THREAD_MULTIPLE`. f16 and bf16 are
/// reduced in f32, and sent as f32 then: a custom MPI operation on 16 bits would round after each pair of ranks, whereas
/// here results are rounded once. Sums are the same on every rank; with more than two ranks their last bits may differ
/// from those of [`Tcp`], since MPI libraries add in an order of their own.
///
/// [`Stats`] counts the bytes that the best algorithm would move, since MPI does not report its own.
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
    // Dropped after the group that uses it.
    comm: Arc<MpiHandle>,
}

impl Mpi {
    /// Returns true where an MPI launcher (`mpirun`, `mpiexec`, `srun --mpi=pmix`) has started this process.
    pub fn is_launched() -> bool {
        library::is_launched()
    }

    /// Returns name and version of the library that this program was built with, for example `Open MPI 4.1.4`.
    pub fn version() -> String {
        library::version()
    }

    /// Starts MPI and returns a configuration: rank and world size from MPI, all else from the environment, as
    /// [`TcpConfig::from_env`] does. With ranks on several hosts, `GIRANDOLE_BIND` must be set on each.
    ///
    /// # Errors
    /// A library without `MPI_THREAD_MULTIPLE`, or another library than the launcher's; an environment that cannot be
    /// used.
    pub fn config() -> Result<TcpConfig> {
        let world = library::start()?;
        TcpConfig::from_env_as(world.rank, world.world_size)
    }

    /// Creates a group of all processes of the job. Each of them must call this. Rank, world size, rendezvous address,
    /// secret and job id of `config` are ignored: the ranks get them from MPI, or exchange them through it.
    ///
    /// # Errors
    /// Those of [`Mpi::config`]; ranks on several hosts that listen on loopback; [`crate::Error::Rendezvous`] when not
    /// all ranks came in time.
    pub fn connect(config: &TcpConfig) -> Result<Self> {
        let library::MpiWorld { rank, world_size } = library::start()?;
        let deadline = Instant::now() + config.bounded_timeout();
        let comm = Arc::new(MpiHandle::world(deadline)?);
        let given = TcpConfig { rank, world_size, ..config.clone() };
        let (config, listener) = meeting::arrange(given, &comm, deadline)?;
        let meeting = meet_with(&config, Options { listener, ..Options::default() })?;
        Self::join(&config, meeting, Members::world(world_size), comm)
    }

    fn join(
        config: &TcpConfig,
        meeting: crate::rendezvous::Meeting,
        members: Members,
        comm: Arc<MpiHandle>,
    ) -> Result<Self> {
        let carrier = MpiCarrier::new(comm.clone(), config.rank, config.world_size);
        Ok(Self { tcp: Tcp::join(config, meeting, members, Some(Box::new(carrier)))?, comm })
    }

    /// Called on the members, by all at the same point of their sequence of operations.
    fn join_group(&self, ranks: &[usize]) -> Result<Self> {
        let (config, meeting, members) = self.tcp.rendezvous(ranks)?;
        // All members have completed the rendezvous, so all call this now. The tag, a digest of the job id, keeps groups
        // apart that are created at the same time, barring a collision.
        let name = digest(config.job_id.bytes().map(usize::from));
        let deadline = Instant::now() + config.bounded_timeout();
        let comm = MpiHandle::of(members.world_ranks(), (name % TAGS) as i32, deadline)?;
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

    fn announce_failure(&self, reason: &str) {
        self.tcp.announce_failure(reason);
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
