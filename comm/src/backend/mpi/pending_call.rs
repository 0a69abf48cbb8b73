//! Non-blocking MPI call under way, together with the buffers that it reads and writes.

#![allow(unsafe_code, reason = "MPI is a C library")]

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;

use candle_core::DType;
use mpi::ffi;

use crate::{ReduceOp, Result};

use super::handle::MpiHandle;
use super::library::{check, mark_given_up};
use super::reduce;

/// The tag of messages with tensors.
const TAG: c_int = 1;

/// An MPI call. Counts are numbers of elements, by rank where there are several.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum MpiCall {
    AllReduce {
        op: ReduceOp,
        count: c_int,
    },
    Reduce {
        op: ReduceOp,
        count: c_int,
        root: c_int,
    },
    /// Works in the output buffer on all ranks.
    Broadcast {
        count: c_int,
        root: c_int,
    },
    AllGather {
        count: c_int,
        counts: PartBounds,
    },
    ReduceScatter {
        op: ReduceOp,
        counts: PartBounds,
    },
    Gather {
        count: c_int,
        counts: PartBounds,
        root: c_int,
    },
    Scatter {
        count: c_int,
        counts: PartBounds,
        root: c_int,
    },
    AllToAll {
        outgoing: PartBounds,
        incoming: PartBounds,
    },
    Send {
        count: c_int,
        to: c_int,
    },
    Receive {
        count: c_int,
        from: c_int,
    },
}

/// Division of a buffer into parts, by rank: the elements of each part, and where it begins.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PartBounds {
    pub(super) counts: Vec<c_int>,
    pub(super) starts: Vec<c_int>,
}

/// A buffer of u64, so that it is aligned for every element type.
pub(super) type Buffer = Vec<u64>;

/// A started call. Dropping it before it is done leaks its memory, which MPI may still use, and calls `mark_given_up`.
pub(super) struct PendingCall {
    request: ffi::MPI_Request,
    /// Not accessed by anyone but MPI while the request is under way.
    buffers: ManuallyDrop<CallBuffers>,
    done: bool,
}

struct CallBuffers {
    input: Buffer,
    output: Buffer,
    call: MpiCall,
}

// SAFETY: MPI runs with MPI_THREAD_MULTIPLE, so any thread may use its handles.
unsafe impl Send for PendingCall {}

impl PendingCall {
    /// Starts a call. The buffers must hold as many elements of `dtype` as the call reads and writes.
    pub(super) fn start(
        comm: &MpiHandle,
        dtype: DType,
        call: MpiCall,
        input: Buffer,
        output: Buffer,
    ) -> Result<Self> {
        let buffers = ManuallyDrop::new(CallBuffers { input, output, call });
        // SAFETY: the handle is a constant.
        let request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let mut call = Self { request, buffers, done: false };
        call.begin(comm, dtype)?;
        Ok(call)
    }

    fn begin(&mut self, comm: &MpiHandle, dtype: DType) -> Result<()> {
        let CallBuffers { input, output, call } = &mut *self.buffers;
        let (input, output): (*const c_void, *mut c_void) =
            (input.as_ptr().cast(), output.as_mut_ptr().cast());
        let (kind, comm, request) = (kind(dtype), comm.raw(), &mut self.request);
        let of = |op: &ReduceOp| reduce::operation(*op, dtype);
        // SAFETY: the buffers are as large as the counts say, which the caller ensures, and neither they nor the lists of
        // counts are touched, moved or freed until `test` has found that the call is done.
        unsafe {
            match call {
                MpiCall::AllReduce { op, count } => check(
                    "MPI_Iallreduce",
                    ffi::MPI_Iallreduce(input, output, *count, kind, of(op)?, comm, request),
                ),
                MpiCall::Reduce { op, count, root } => check(
                    "MPI_Ireduce",
                    ffi::MPI_Ireduce(input, output, *count, kind, of(op)?, *root, comm, request),
                ),
                MpiCall::Broadcast { count, root } => {
                    check("MPI_Ibcast", ffi::MPI_Ibcast(output, *count, kind, *root, comm, request))
                }
                MpiCall::AllGather { count, counts: PartBounds { counts, starts } } => {
                    let (counts, starts) = (counts.as_ptr(), starts.as_ptr());
                    let code = ffi::MPI_Iallgatherv(
                        input, *count, kind, output, counts, starts, kind, comm, request,
                    );
                    check("MPI_Iallgatherv", code)
                }
                MpiCall::ReduceScatter { op, counts } => {
                    let counts = counts.counts.as_ptr();
                    let code = ffi::MPI_Ireduce_scatter(input, output, counts, kind, of(op)?, comm, request);
                    check("MPI_Ireduce_scatter", code)
                }
                MpiCall::Gather { count, counts: PartBounds { counts, starts }, root } => {
                    let (counts, starts) = (counts.as_ptr(), starts.as_ptr());
                    let code = ffi::MPI_Igatherv(
                        input, *count, kind, output, counts, starts, kind, *root, comm, request,
                    );
                    check("MPI_Igatherv", code)
                }
                MpiCall::Scatter { count, counts: PartBounds { counts, starts }, root } => {
                    let (counts, starts) = (counts.as_ptr(), starts.as_ptr());
                    let code = ffi::MPI_Iscatterv(
                        input, counts, starts, kind, output, *count, kind, *root, comm, request,
                    );
                    check("MPI_Iscatterv", code)
                }
                MpiCall::AllToAll { outgoing, incoming } => {
                    let (from, at) = (outgoing.counts.as_ptr(), outgoing.starts.as_ptr());
                    let (to, place) = (incoming.counts.as_ptr(), incoming.starts.as_ptr());
                    let code =
                        ffi::MPI_Ialltoallv(input, from, at, kind, output, to, place, kind, comm, request);
                    check("MPI_Ialltoallv", code)
                }
                MpiCall::Send { count, to } => {
                    check("MPI_Isend", ffi::MPI_Isend(input, *count, kind, *to, TAG, comm, request))
                }
                MpiCall::Receive { count, from } => {
                    check("MPI_Irecv", ffi::MPI_Irecv(output, *count, kind, *from, TAG, comm, request))
                }
            }
        }
    }

    /// Returns true once the call is done.
    pub(super) fn test(&mut self) -> Result<bool> {
        if !self.done {
            let mut done = 0;
            // SAFETY: the request was started, and is tested until it is done.
            let code = unsafe { ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            check("MPI_Test", code)?;
            self.done = done != 0;
        }
        Ok(self.done)
    }

    /// Returns the buffers of a call that is done; None where it is not.
    pub(super) fn take_buffers(mut self) -> Option<(Buffer, Buffer)> {
        if !self.done {
            return None;
        }
        let CallBuffers { input, output, .. } = &mut *self.buffers;
        Some((std::mem::take(input), std::mem::take(output)))
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        if self.done {
            // SAFETY: MPI is done with it, and it is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.buffers) };
        } else {
            mark_given_up();
        }
    }
}

/// Returns the MPI datatype of elements that are reduced or only moved; f16 and bf16 are never reduced as they are.
fn kind(dtype: DType) -> ffi::MPI_Datatype {
    // SAFETY: the handles are constants.
    unsafe {
        match dtype {
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F16 | DType::BF16 => ffi::RSMPI_UINT16_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            _ => ffi::RSMPI_UINT8_T,
        }
    }
}
