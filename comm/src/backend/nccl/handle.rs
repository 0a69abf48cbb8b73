//! NCCL communicator: the only file that makes NCCL's communicator calls.

#![allow(unsafe_code, reason = "NCCL is a C library")]

use std::ffi::{c_char, c_int, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::DType;
use candle_core::cuda::cudarc::driver::CudaStream;
use candle_core::cuda::cudarc::nccl::{result, sys};

use crate::base::lock;
use crate::{Error, ReduceOp, Result};

use super::calls::NcclCall;
use super::library::{check, check_result};
use super::shutdown::CommShutdown;

/// Longest that a rank which closes its last group waits for NCCL, which waits for the other ranks of its host.
const MAX_SHUTDOWN_WAIT: Duration = Duration::from_secs(5);
/// Between two polls of a communicator that is being finalized.
const PAUSE: Duration = Duration::from_millis(1);
/// Value of `ncclConfig_t::magic` that the library checks.
const MAGIC: u32 = 0xcafe_beef;
/// The NCCL version whose configuration fields are set: 2.17. Later fields keep their defaults.
const VERSION: u32 = 21_700;

/// The communicators of this process.
static OPEN: Mutex<OpenComms> = Mutex::new(OpenComms { count: 0, ending: Vec::new() });

struct OpenComms {
    count: usize,
    /// Ends of those that were closed before others, and are still under way.
    ending: Vec<CommShutdown>,
}

/// Length of the id that all ranks of a communicator must share.
pub(super) const ID_BYTES: usize = 128;

/// Device addresses that a call reads from and writes to; 0 for none.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Addresses {
    pub(super) from: u64,
    pub(super) into: u64,
}

/// A non-blocking communicator: each call returns at once, and [`NcclHandle::is_ready`] reports when its work on the host is
/// done. The calls that end it block in any mode, and therefore run on a thread of their own.
#[derive(Debug)]
pub(super) struct NcclHandle {
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
    time_limit: Duration,
    /// Some once the communicator was given up.
    shutdown: Option<CommShutdown>,
}

/// A communicator that is to be ended, by abort or by finalize and destroy.
struct ClosingComm {
    comm: sys::ncclComm_t,
    stream: Arc<CudaStream>,
}

// SAFETY: NCCL allows any thread to use a communicator, one at a time, which `&mut self` ensures.
unsafe impl Send for NcclHandle {}
// SAFETY: as above; it is used once, by value.
unsafe impl Send for ClosingComm {}

/// Creates the id of a new communicator, to be sent to its ranks.
pub(super) fn new_id() -> Result<[u8; ID_BYTES]> {
    let id = check_result("ncclGetUniqueId", result::get_uniqueid())?;
    Ok(id.internal.map(|byte| byte as u8))
}

impl NcclHandle {
    /// Begins to connect to the other ranks; done when [`NcclHandle::is_ready`]. `timeout` is the group's.
    pub(super) fn begin(
        id: &[u8; ID_BYTES],
        rank: usize,
        world_size: usize,
        stream: Arc<CudaStream>,
        timeout: Duration,
    ) -> Result<Self> {
        bind(&stream)?;
        let id = sys::ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut config = config();
        // Less than the time-out: another group that waits for this rank meanwhile may have the same one.
        let time_limit = MAX_SHUTDOWN_WAIT.min(timeout / 4);
        lock(&OPEN).count += 1;
        let mut handle = Self { comm: null_mut(), stream, time_limit, shutdown: None };
        // SAFETY: the configuration is valid for NCCL, and is copied; the handle is written before the call returns.
        let code = unsafe {
            sys::ncclCommInitRankConfig(&mut handle.comm, world_size as c_int, id, rank as c_int, &mut config)
        };
        check("ncclCommInitRankConfig", code, handle.comm)?;
        Ok(handle)
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Returns false once the communicator was given up.
    pub(super) fn is_open(&self) -> bool {
        !self.comm.is_null()
    }

    /// Returns false while NCCL is still working on the last call; an error of NCCL, or of its network, whenever it
    /// occurred.
    pub(super) fn is_ready(&mut self, call: &str) -> Result<bool> {
        if self.comm.is_null() {
            return Err(Error::system(call, "NCCL was given up before"));
        }
        // SAFETY: the communicator is valid.
        unsafe { state_of(call, self.comm) }
    }

    /// Starts calls on the stream, as one NCCL group.
    ///
    /// # Safety
    /// Each address is that of as many elements of the call's dtype as the call counts, on this communicator's device,
    /// and nobody frees them before the stream has finished with them.
    pub(super) unsafe fn start(&mut self, calls: &[(NcclCall, DType, Addresses)]) -> Result<()> {
        if self.comm.is_null() {
            return Err(Error::system("NCCL", "it was given up before"));
        }
        bind(&self.stream)?;
        check_result("ncclGroupStart", result::group_start())?;
        let mut outcome = Ok(());
        for (call, dtype, addresses) in calls {
            // SAFETY: the caller's obligation.
            let code = unsafe { self.call(call, *dtype, *addresses) };
            outcome = check(call.name(), code, self.comm);
            if outcome.is_err() {
                break;
            }
        }
        // A group that was started must be ended, even after an error.
        let ended = check_result("ncclGroupEnd", result::group_end());
        outcome.and(ended.map(drop))
    }

    /// # Safety
    /// See [`NcclHandle::start`].
    unsafe fn call(&self, call: &NcclCall, dtype: DType, addresses: Addresses) -> sys::ncclResult_t {
        let (from, into) = (addresses.from as *const c_void, addresses.into as *mut c_void);
        let (kind, comm, stream) = (kind(dtype), self.comm, self.stream.cu_stream() as sys::cudaStream_t);
        // SAFETY: the caller's obligation; communicator and stream are valid.
        unsafe {
            match call {
                NcclCall::AllReduce { count, op, .. } => {
                    sys::ncclAllReduce(from, into, *count, kind, reduction(*op), comm, stream)
                }
                NcclCall::Reduce { count, op, root, .. } => {
                    let (op, root) = (reduction(*op), *root as c_int);
                    sys::ncclReduce(from, into, *count, kind, op, root, comm, stream)
                }
                NcclCall::Broadcast { count, root, .. } => {
                    sys::ncclBroadcast(from, into, *count, kind, *root as c_int, comm, stream)
                }
                NcclCall::AllGather { count, .. } => {
                    sys::ncclAllGather(from, into, *count, kind, comm, stream)
                }
                NcclCall::ReduceScatter { count, op, .. } => {
                    sys::ncclReduceScatter(from, into, *count, kind, reduction(*op), comm, stream)
                }
                NcclCall::Send { count, to, .. } => {
                    sys::ncclSend(from, *count, kind, *to as c_int, comm, stream)
                }
                NcclCall::Receive { count, from, .. } => {
                    sys::ncclRecv(into, *count, kind, *from as c_int, comm, stream)
                }
            }
        }
    }

    /// Aborts what is under way, here and, once they notice, on the other ranks. Returns at once; None where there was no
    /// communicator.
    pub(super) fn abort(&mut self) -> Option<CommShutdown> {
        self.leave(ClosingComm::abort)
    }

    fn leave(&mut self, how: fn(ClosingComm) -> bool) -> Option<CommShutdown> {
        let comm = std::mem::replace(&mut self.comm, null_mut());
        if !comm.is_null() {
            let leaving = ClosingComm { comm, stream: self.stream.clone() };
            self.shutdown = Some(CommShutdown::begin(self.time_limit, move || how(leaving)));
        }
        self.shutdown.clone()
    }
}

impl Drop for NcclHandle {
    /// Waits only when no other communicator of this process is open: NCCL waits for the other ranks of this host, which
    /// may close theirs in another order.
    fn drop(&mut self) {
        // Finalize first: what this rank has sent may still be in flight.
        let shutdown = self.leave(ClosingComm::finish);
        let mut open = lock(&OPEN);
        open.count -= 1;
        open.ending.extend(shutdown);
        open.ending.retain(|ending| !ending.is_over());
        if open.count == 0 {
            let ending = std::mem::take(&mut open.ending);
            drop(open);
            ending.iter().for_each(CommShutdown::wait);
        }
    }
}

impl ClosingComm {
    /// Aborts the communicator. Returns true if the device has finished all work that was submitted to it.
    fn abort(self) -> bool {
        // SAFETY: the communicator is valid, and not used after this.
        let aborted = |()| unsafe { result::comm_abort(self.comm) }.is_ok();
        bind(&self.stream).is_ok_and(aborted) && self.stream.synchronize().is_ok()
    }

    /// Ends the communicator after all operations that this rank has begun. Returns the same as `abort`.
    fn finish(self) -> bool {
        if bind(&self.stream).is_err() {
            return false;
        }
        // SAFETY: the communicator is valid.
        let code = unsafe { sys::ncclCommFinalize(self.comm) };
        let mut state = check("ncclCommFinalize", code, self.comm).map(|()| false);
        while let Ok(false) = state {
            std::thread::sleep(PAUSE);
            // SAFETY: as above.
            state = unsafe { state_of("ncclCommFinalize", self.comm) };
        }
        if state.is_err() {
            return self.abort();
        }
        // SAFETY: as above, and it is not used after this.
        unsafe { result::comm_destroy(self.comm) }.is_ok() && self.stream.synchronize().is_ok()
    }
}

/// Returns whether NCCL has finished the last call; an error of NCCL, or of its network, whenever it occurred.
///
/// # Safety
/// The communicator is valid.
unsafe fn state_of(call: &str, comm: sys::ncclComm_t) -> Result<bool> {
    let mut state = sys::ncclResult_t::ncclSuccess;
    // SAFETY: the caller's obligation.
    let code = unsafe { sys::ncclCommGetAsyncError(comm, &mut state) };
    check(call, code, comm)?;
    check(call, state, comm)?;
    Ok(state == sys::ncclResult_t::ncclSuccess)
}

/// Makes the stream's device the calling thread's current one, which is the one that NCCL uses.
fn bind(stream: &CudaStream) -> Result<()> {
    stream.context().bind_to_thread().map_err(|error| Error::system("choosing a CUDA device", error))
}

/// Returns a configuration with non-blocking mode, and NCCL's defaults for everything else.
fn config() -> sys::ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    // SAFETY: all fields allow zero.
    let mut config = unsafe { MaybeUninit::<sys::ncclConfig_t>::zeroed().assume_init() };
    // The stated version does not have the fields from here on, and does not read them.
    config.size = offset_of!(sys::ncclConfig_t, trafficClass);
    (config.magic, config.version, config.blocking) = (MAGIC, VERSION, 0);
    (config.cgaClusterSize, config.minCTAs, config.maxCTAs) = (UNDEFINED, UNDEFINED, UNDEFINED);
    (config.netName, config.splitShare) = (null(), UNDEFINED);
    config
}

fn kind(dtype: DType) -> sys::ncclDataType_t {
    match dtype {
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::U32 => sys::ncclDataType_t::ncclUint32,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        _ => sys::ncclDataType_t::ncclUint8,
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Avg => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Product => sys::ncclRedOp_t::ncclProd,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
    }
}
