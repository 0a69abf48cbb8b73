//! NCCL carrier: operations on CUDA tensors as NCCL calls, on a separate stream.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use candle_core::backend::BackendStorage;
use candle_core::cuda::CudaStorageSlice;
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, DevicePtr, DriverError};
use candle_core::{CpuStorage, CudaStorage, DType, Device, InplaceOp1, Layout, Storage, Tensor};

use crate::backend::traffic;
use crate::base::buffer::staging::Before;
use crate::base::buffer::storage;
use crate::base::lock;
use crate::transport::carrier::{Carrier, PollBackoff};
use crate::{Error, Operation, ReduceOp, Result, TcpConfig};

use super::calls::{self, NcclCall, TensorOffset};
use super::handle::{Addresses, NcclHandle};
use super::launch;
use super::watch::WatchedHandle;

pub(super) struct NcclCarrier {
    shared: Arc<WatchedHandle>,
    ordinal: usize,
    rank: usize,
    world_size: usize,
    timeout: Duration,
    pending: Option<PendingOperation>,
    /// The ranks to which messages went, or from which they came.
    met: BTreeSet<usize>,
    bytes: (u64, u64),
}

/// Tensors to be rounded to f16 or bf16, by their index; each with the tensor that takes the result.
type Rounded = Vec<(usize, Tensor)>;

/// The tensors of an operation, converted as needed.
#[derive(Default)]
struct Prepared {
    tensors: Vec<Tensor>,
    rounded: Rounded,
    /// Recorded after what the device computes for these tensors; None where that is nothing.
    ready: Option<CudaEvent>,
}

/// An operation under way. It keeps its tensors alive until the device has finished with them.
struct PendingOperation {
    call: &'static str,
    /// What NCCL reads and writes, followed by the tensors involved in rounding.
    tensors: Vec<Tensor>,
    /// Which of these are still to be rounded, and into which tensor.
    rounded: Rounded,
    /// Recorded after the last work submitted to the device; None until NCCL has put the operation into its stream.
    end: Option<CudaEvent>,
}

impl Carrier for NcclCarrier {
    fn takes(&self, operation: &Operation) -> bool {
        let tensors = operation.tensors();
        !tensors.is_empty() && tensors.iter().all(|tensor| tensor.device().is_cuda())
    }

    fn begin(&mut self, operation: &Operation, before: &Before) -> Result<()> {
        let (sent, received) = traffic::operation_bytes(operation, self.rank, self.world_size);
        self.bytes = (self.bytes.0 + sent, self.bytes.1 + received);
        let mut calls = calls::of(operation, self.rank, self.world_size);
        let Some(first) = calls.first() else { return Ok(()) };
        let name = first.name();
        for tensor in operation.tensors() {
            self.check_device(operation, tensor)?;
        }
        let Prepared { tensors, rounded, ready } = self.prepare(operation, &mut calls, before)?;
        self.shared.check()?;
        let mut handle = lock(&self.shared.handle);
        let handle = handle.as_mut().ok_or_else(|| Error::system(name, "NCCL was not started"))?;
        before.block_stream(handle.stream())?;
        if let Some(ready) = &ready {
            handle.stream().wait(ready).map_err(failed)?;
        }
        let mut addressed = Vec::with_capacity(calls.len());
        for call in calls {
            let (from, into) = call.places();
            let address = |place: Option<TensorOffset>| {
                place.map_or(Ok(0), |place| address(&tensors[place.tensor], place.first, handle.stream()))
            };
            let addresses = Addresses { from: address(from)?, into: address(into)? };
            let dtype = tensors[call.tensor()].dtype();
            addressed.push((call, dtype, addresses));
        }
        // Stored before NCCL is called, so that nothing is freed if the calls fail halfway.
        self.pending = Some(PendingOperation { call: name, tensors, rounded, end: None });
        self.shared.begin(name, self.timeout);
        launch::start(handle, &addressed)
    }

    fn poll(&mut self) -> Result<bool> {
        let Some(pending) = &mut self.pending else { return Ok(true) };
        if !self.shared.is_queued(pending)? {
            return Ok(false);
        }
        // This may block on a device that is stuck: no lock is held meanwhile.
        let is_past = |end: &CudaEvent| end.try_is_complete().map_err(failed);
        if !pending.end.as_ref().map_or(Ok(false), is_past)? {
            return Ok(false);
        }
        if !pending.rounded.is_empty() {
            pending.round()?;
            return Ok(false);
        }
        // The watchdog may have aborted it.
        self.shared.check()?;
        self.pending = None;
        self.shared.end();
        Ok(true)
    }

    fn abandon(&mut self) {
        let shutdown = lock(&self.shared.handle).as_mut().and_then(NcclHandle::abort);
        self.shared.end();
        let (Some(pending), Some(shutdown)) = (self.pending.take(), shutdown) else { return };
        // The caller gets its tensors back when the device has finished with them, which does not depend on other ranks.
        let mut nap = PollBackoff::default();
        while !shutdown.is_over() && !pending.is_finished() {
            nap.wait();
        }
        shutdown.keep(pending);
    }

    fn bytes(&self) -> (u64, u64) {
        self.bytes
    }
}

impl NcclCarrier {
    pub(super) fn new(shared: Arc<WatchedHandle>, ordinal: usize, config: &TcpConfig) -> Self {
        let (rank, world_size, timeout) = (config.rank, config.world_size, config.bounded_timeout());
        Self {
            shared,
            ordinal,
            rank,
            world_size,
            timeout,
            pending: None,
            met: BTreeSet::new(),
            bytes: (0, 0),
        }
    }

    fn check_device(&self, operation: &Operation, tensor: &Tensor) -> Result<()> {
        let own = self.ordinal;
        match tensor.device() {
            Device::Cuda(device) if device.cuda_stream().context().ordinal() == own => Ok(()),
            Device::Cuda(device) => {
                let got = format!("a tensor of CUDA device {}", device.cuda_stream().context().ordinal());
                Err(Error::invalid(operation.name(), got, format!("this group uses CUDA device {own}")))
            }
            _ => Err(Error::invalid(operation.name(), "a tensor of the CPU", "give CUDA tensors only")),
        }
    }

    /// Adds greetings to the first messages between ranks.
    fn greet(&mut self, calls: &mut Vec<NcclCall>, mut tensors: Vec<Tensor>) -> Result<Prepared> {
        let greetings = calls::greetings(calls, self.rank, &mut self.met, tensors.len());
        if greetings.is_empty() {
            return Ok(Prepared { tensors, ..Prepared::default() });
        }
        let bytes = Tensor::zeros(1 + greetings.len() / 2, DType::U8, tensors[0].device())?;
        let ready = Some(stream_of(&bytes)?.record_event(None).map_err(failed)?);
        tensors.push(bytes);
        calls.splice(..0, greetings);
        Ok(Prepared { tensors, ready, ..Prepared::default() })
    }

    /// Returns the tensors that NCCL works on. f16 and bf16 are converted to f32 where they are summed, and rounded once
    /// at the end. The first messages between ranks get more calls.
    fn prepare(
        &mut self,
        operation: &Operation,
        calls: &mut Vec<NcclCall>,
        before: &Before,
    ) -> Result<Prepared> {
        let mut tensors: Vec<Tensor> = operation.tensors().into_iter().cloned().collect();
        let (op, results) = match operation {
            Operation::AllReduce { op, .. } | Operation::AllReduceCoalesced { op, .. } => {
                (*op, 0..tensors.len())
            }
            Operation::Reduce { op, root, .. } => (*op, 0..usize::from(self.rank == *root)),
            // The tensors of the operation are output, then input.
            Operation::ReduceScatter { op, .. } => (*op, 0..1),
            Operation::Send { .. } | Operation::Recv { .. } | Operation::Batch { .. } => {
                return self.greet(calls, tensors);
            }
            _ => return Ok(Prepared { tensors, ..Prepared::default() }),
        };
        let half = tensors.first().is_some_and(|tensor| storage::is_half(tensor.dtype()));
        if !half || matches!(op, ReduceOp::Min | ReduceOp::Max) {
            return Ok(Prepared { tensors, ..Prepared::default() });
        }
        let rounded = results.map(|index| (index, tensors[index].clone())).collect();
        let computing = stream_of(&tensors[0])?;
        before.block_stream(&computing)?;
        // CUDA refuses to convert a tensor without elements.
        for tensor in tensors.iter_mut().filter(|tensor| tensor.elem_count() > 0) {
            *tensor = tensor.to_dtype(DType::F32)?;
        }
        let ready = Some(computing.record_event(None).map_err(failed)?);
        Ok(Prepared { tensors, rounded, ready })
    }
}

impl WatchedHandle {
    /// Returns whether NCCL has put the operation into its stream, and then records an event after it.
    fn is_queued(&self, pending: &mut PendingOperation) -> Result<bool> {
        self.check()?;
        let mut handle = lock(&self.handle);
        let handle = handle.as_mut().ok_or_else(|| Error::system(pending.call, "NCCL was not started"))?;
        // Network errors are reported at any time.
        if !handle.is_ready(pending.call)? {
            return Ok(false);
        }
        if pending.end.is_none() {
            pending.end = Some(handle.stream().record_event(None).map_err(failed)?);
        }
        Ok(true)
    }
}

impl PendingOperation {
    /// Returns whether the device has finished with what NCCL has put into its stream. An error counts: a device that has
    /// failed reports nothing else.
    fn is_finished(&self) -> bool {
        self.end.as_ref().is_some_and(|end| !matches!(end.try_is_complete(), Ok(false)))
    }

    /// Submits the rounding of NCCL's sums to the device.
    fn round(&mut self) -> Result<()> {
        for (index, tensor) in std::mem::take(&mut self.rounded) {
            if tensor.elem_count() > 0 {
                let narrow = self.tensors[index].to_dtype(tensor.dtype())?;
                tensor.inplace_op1(&Copy(narrow.clone()))?;
                self.end = Some(stream_of(&tensor)?.record_event(None).map_err(failed)?);
                self.tensors.extend([narrow, tensor]);
            }
        }
        Ok(())
    }
}

impl NcclCall {
    /// Returns what the call reads and what it writes.
    fn places(&self) -> (Option<TensorOffset>, Option<TensorOffset>) {
        match self {
            NcclCall::AllReduce { at, .. } => (Some(*at), Some(*at)),
            NcclCall::Reduce { from, into, .. } => (Some(*from), *into),
            NcclCall::Broadcast { from, into, .. } => (*from, Some(*into)),
            NcclCall::AllGather { from, into, .. } | NcclCall::ReduceScatter { from, into, .. } => {
                (Some(*from), Some(*into))
            }
            NcclCall::Send { from, .. } => (Some(*from), None),
            NcclCall::Receive { into, .. } => (None, Some(*into)),
        }
    }

    /// Returns the index of a tensor that has the call's dtype.
    fn tensor(&self) -> usize {
        let (from, into) = self.places();
        from.or(into).map_or(0, |place| place.tensor)
    }
}

/// Returns the stream on which the tensor's device computes.
fn stream_of(tensor: &Tensor) -> Result<Arc<CudaStream>> {
    match tensor.device() {
        Device::Cuda(device) => Ok(device.cuda_stream()),
        _ => Err(not_usable()),
    }
}

/// Returns the device address of an element, valid as long as the tensor lives.
fn address(tensor: &Tensor, first: usize, stream: &CudaStream) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, _))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(not_usable());
    };
    macro_rules! start_of {
        ($data:expr) => {
            $data.device_ptr(stream).0
        };
    }
    let base = match &storage.slice {
        CudaStorageSlice::F64(data) => start_of!(data),
        CudaStorageSlice::F32(data) => start_of!(data),
        CudaStorageSlice::F16(data) => start_of!(data),
        CudaStorageSlice::BF16(data) => start_of!(data),
        CudaStorageSlice::U8(data) => start_of!(data),
        CudaStorageSlice::U32(data) => start_of!(data),
        CudaStorageSlice::I64(data) => start_of!(data),
        _ => return Err(not_usable()),
    };
    Ok(base + ((start + first) * tensor.dtype().size_in_bytes()) as u64)
}

/// Copies the elements of an f16 or bf16 tensor into another one.
struct Copy(Tensor);

impl InplaceOp1 for Copy {
    fn name(&self) -> &'static str {
        "comm"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(not_usable().into())
    }

    fn cuda_fwd(&self, into: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let stream = into.device().cuda_stream();
        let (from, own) = self.0.storage_and_layout();
        let (Storage::Cuda(from), Some((first, end)), Some((start, _))) =
            (&*from, layout.contiguous_offsets(), own.contiguous_offsets())
        else {
            return Err(not_usable().into());
        };
        let source = start..start + (end - first);
        let copied = match (&from.slice, &mut into.slice) {
            (CudaStorageSlice::F16(from), CudaStorageSlice::F16(into)) => {
                stream.memcpy_dtod(&from.slice(source), &mut into.slice_mut(first..end))
            }
            (CudaStorageSlice::BF16(from), CudaStorageSlice::BF16(into)) => {
                stream.memcpy_dtod(&from.slice(source), &mut into.slice_mut(first..end))
            }
            _ => return Err(not_usable().into()),
        };
        Ok(copied.map_err(failed)?)
    }
}

pub(super) fn failed(error: DriverError) -> Error {
    Error::system("a CUDA device", error)
}

fn not_usable() -> Error {
    Error::invalid("a tensor", "one that is not contiguous on a CUDA device", "call `contiguous()` first")
}
