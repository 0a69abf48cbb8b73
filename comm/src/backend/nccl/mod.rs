//! NCCL backend: ranks with one CUDA device each, whose data NVIDIA's NCCL moves.
//!
//! Tested on a machine without a GPU, with stand-ins for the driver and NCCL (`scripts/check-nccl.sh`). They show that
//! calls are made in order, that buffers live long enough and that errors name their cause. What has run on a GPU is in
//! `docs/gpu-check-h100.md`.

mod calls;
mod carrier;
mod choice;
mod handle;
mod launch;
mod library;
mod shutdown;
mod watch;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{CudaDevice, Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::base::lock;
use crate::base::members::Members;
use crate::rendezvous::{Meeting, meet};
use crate::transport::carrier::PollBackoff;
use crate::{Communicator, Error, Operation, Result, Stats, Tcp, TcpConfig, Work, all_gather_object};

use carrier::{NcclCarrier, failed};
use handle::{ID_BYTES, NcclHandle};
use watch::{Watchdog, WatchedHandle};

/// One rank of a group in which NCCL moves the data of CUDA tensors, with one device for each rank.
///
/// The ranks find each other, agree on each call before NCCL is called, and detect failures as those of [`Tcp`] do;
/// operations on CPU tensors go over these connections, too. NCCL works on a stream of its own: an operation starts after
/// the work that was submitted to the device before it, and runs concurrently with what is submitted afterwards, until
/// [`Work::wait`] returns; the order is kept on the device, by events, and no thread waits for it. NCCL never blocks a
/// thread. An operation that fails or takes longer than the time-out is aborted, even while a driver call waits for it,
/// and an error between two operations is detected: all ranks then report the rank on which NCCL failed, the operation
/// and the reason. Dropping a group waits for the other ranks of the host to drop theirs, because NCCL does, but at most
/// 5 s or a quarter of the time-out, whichever is less; a background thread does the rest.
/// f16 and bf16 are summed in f32. The handling of NaN in minima and maxima is NCCL's, and so is the order of sums,
/// which is the same on every rank. An average multiplies by one over the number of ranks before it sums: unless that
/// number is a power of two, the last bit may differ from that of [`Tcp`].
///
/// [`Stats`] counts the bytes that the best algorithm would move, since NCCL does not report its own.
///
/// # Batches
/// If a batch has several messages to one rank, that rank must receive them in a batch, too: for NCCL the second of them
/// waits until the first and what was received meanwhile are done.
///
/// # Several groups on one GPU
/// Each group has a thread and a stream of its own, so operations that a rank runs in several groups at the same time
/// reach the GPU in no fixed order, and in another order on other ranks. A collective begins when all of its ranks have
/// called it, a single receive when its sender has; after that, the kernels only need to run concurrently, and GPUs have
/// room for several of them. NVIDIA promises progress only where all ranks have the same order ("Using multiple NCCL
/// communicators concurrently" in NCCL's user guide). Where that matters, wait for one group's work before another
/// group's is submitted, on all ranks alike. A send, and the messages of a batch, occupy the GPU while they wait for the
/// other rank: anything that waits for the whole device meanwhile, as freeing memory may, must not be what that rank
/// waits for. Leave `NCCL_LAUNCH_ORDER_IMPLICIT` off, its default: it requires a single thread for each device, and NCCL
/// fails where several race.
///
/// ```no_run
/// use candle_core::{DType, Tensor};
/// use comm::{Communicator, Nccl, ReduceOp, TcpConfig};
///
/// let device = comm::open_cuda_device(0)?;
/// let comm = Nccl::connect(&TcpConfig::from_env()?, &device)?;
/// let tensor = Tensor::ones(4, DType::F32, &device)?;
/// comm.all_reduce(&tensor, ReduceOp::Sum)?.wait()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Nccl {
    tcp: Tcp,
    device: CudaDevice,
    config: TcpConfig,
    // Dropped after the group that they belong to.
    _watchdog: Watchdog,
    _shared: Arc<WatchedHandle>,
}

/// What each rank sends to the others about its device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DeviceIdentity {
    uuid: Vec<u8>,
    ordinal: usize,
}

impl Nccl {
    /// Returns NCCL's version, for example `2.27.3`; None where the library cannot be used.
    pub fn version() -> Option<String> {
        library::version()
    }

    /// Joins the group: waits for the other ranks, each of which has another device. [`Nccl::connect_or_tcp`] chooses the
    /// backend by what the ranks have.
    ///
    /// # Errors
    /// Those of [`Tcp::connect`]; a device that is not a CUDA device, or that two ranks share; errors of NCCL.
    pub fn connect(config: &TcpConfig, device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else {
            return Err(Error::invalid("NCCL's device", "the CPU", "give a CUDA device, or use Tcp"));
        };
        Self::join(config.clone(), meet(config)?, Members::world(config.world_size), device)
    }

    fn join(config: TcpConfig, meeting: Meeting, members: Members, device: &CudaDevice) -> Result<Self> {
        let shared: Arc<WatchedHandle> = Arc::default();
        let ordinal = device.cuda_stream().context().ordinal();
        let carrier = NcclCarrier::new(shared.clone(), ordinal, &config);
        let tcp = Tcp::join(&config, meeting, members, Some(Box::new(carrier)))?;
        check_devices(&tcp, device)?;
        let handle = start(&tcp, &config, device)?;
        *lock(&shared.handle) = Some(handle);
        let watchdog = Watchdog::start(shared.clone(), tcp.supervisor(), config.rank)?;
        // A rank that failed before this point has left the group; the others get that error here.
        tcp.run(Operation::Barrier)?;
        Ok(Self { tcp, device: device.clone(), config, _watchdog: watchdog, _shared: shared })
    }
}

/// Returns an identifier that distinguishes the device from all others, including those of other hosts. For NCCL a GPU
/// is another one where `NCCL_HOSTID` names another host, so that is a part of it.
fn uuid(device: &CudaDevice) -> Result<Vec<u8>> {
    let uuid = device.cuda_stream().context().uuid().map_err(failed)?;
    let host = std::env::var_os("NCCL_HOSTID").unwrap_or_default();
    Ok(uuid.bytes.iter().map(|byte| *byte as u8).chain(host.into_encoded_bytes()).collect())
}

/// Checks that no two ranks share a device. NCCL refuses that too, but with an error that names neither.
fn check_devices(tcp: &Tcp, device: &CudaDevice) -> Result<()> {
    let ordinal = device.cuda_stream().context().ordinal();
    let places = all_gather_object(tcp, &DeviceIdentity { uuid: uuid(device)?, ordinal })?;
    for (rank, place) in places.iter().enumerate() {
        if let Some(other) = places[..rank].iter().position(|other| other.uuid == place.uuid) {
            let world = |rank: usize| tcp.world_ranks()[rank];
            let got = format!("one GPU for ranks {} and {}", world(other), world(rank));
            let help = "give each rank a GPU of its own, or let ranks share GPUs over TCP (--backend tcp)";
            return Err(Error::invalid("NCCL's devices", got, help));
        }
    }
    Ok(())
}

/// Creates the NCCL communicator: rank 0 sends its id to the others over our connections.
fn start(tcp: &Tcp, config: &TcpConfig, device: &CudaDevice) -> Result<NcclHandle> {
    const CALL: &str = "ncclCommInitRankConfig";
    let id = if tcp.rank() == 0 { handle::new_id()?.to_vec() } else { vec![0; ID_BYTES] };
    let id = Tensor::from_vec(id, ID_BYTES, &Device::Cpu)?;
    tcp.run(Operation::Broadcast { tensor: id.clone(), root: 0 })?;
    let id: [u8; ID_BYTES] =
        id.to_vec1::<u8>()?.try_into().map_err(|_| Error::system(CALL, "an id of another length"))?;
    let stream = device.cuda_stream().context().new_stream().map_err(failed)?;
    let timeout = config.bounded_timeout();
    let mut handle = NcclHandle::begin(&id, tcp.rank(), tcp.world_size(), stream, timeout)?;
    let (deadline, mut nap) = (Instant::now() + timeout, PollBackoff::default());
    loop {
        let error = match handle.is_ready(CALL) {
            Ok(true) => return Ok(handle),
            Ok(false) if Instant::now() >= deadline => {
                Some(Error::system(CALL, "NCCL did not bring the ranks together within the time-out"))
            }
            Ok(false) => tcp.failure(CALL),
            // Where a rank is gone, that explains NCCL's error better.
            Err(error) => tcp.failure(CALL).or(Some(error)),
        };
        if let Some(error) = error {
            handle.abort();
            return Err(error);
        }
        nap.wait();
    }
}

impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn world_size(&self) -> usize {
        self.tcp.world_size()
    }

    fn backend(&self) -> &'static str {
        "nccl"
    }

    fn stats(&self) -> Stats {
        self.tcp.stats()
    }

    fn world_ranks(&self) -> &[usize] {
        self.tcp.world_ranks()
    }

    // Not by `ncclCommSplit`: all ranks of the parent must call it, even those that get no group, and while none of them
    // has an operation under way, whereas a subgroup involves its members only, and operations are queued. The members
    // run a rendezvous anyway, for what goes over our connections, and the id of a new communicator is one more
    // broadcast. Separate communicators also do not share failures.
    fn subgroup(&self, ranks: &[usize]) -> Result<Arc<dyn Communicator>> {
        let (config, meeting, members) = self.tcp.rendezvous(ranks)?;
        Ok(Arc::new(Self::join(config, meeting, members, &self.device)?))
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

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, config, .. } = self;
        let ordinal = device.cuda_stream().context().ordinal();
        write!(f, "Nccl(rank {} of {}, CUDA device {ordinal})", config.rank, config.world_size)
    }
}
