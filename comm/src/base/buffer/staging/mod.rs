//! Staging of CUDA tensors in pinned host memory: links and reductions work on host memory only.
//!
//! A tensor's elements are copied to the host when an operation first accesses them, and copied back when it is done.
//! Both copies use a CUDA stream of their own, so that they do not queue behind later work of the device; see
//! [`Before`] for what they wait for.

mod pinned;
mod upload;

pub(crate) use upload::upload;

use std::cell::OnceCell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use candle_core::backend::BackendStorage;
use candle_core::cuda::CudaStorageSlice;
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, DriverError};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Storage, Tensor};

use crate::base::lock;
use crate::{Error, Operation, Result};

use self::pinned::Pinned;

/// Returns whether tensors on this device can take part in operations.
pub(crate) fn is_supported(device: &Device) -> bool {
    device.is_cpu() || device.is_cuda()
}

/// The device work that must be done before an operation may begin: all that the submitting thread had enqueued when it
/// submitted the operation.
pub(crate) struct Before(Vec<CudaEvent>);

impl Before {
    pub(crate) fn of(operation: &Operation) -> Result<Self> {
        let mut devices: Vec<&CudaDevice> = Vec::new();
        for tensor in operation.tensors() {
            if let Device::Cuda(device) = tensor.device()
                && !devices.iter().any(|known| known.id() == device.id())
            {
                devices.push(device);
            }
        }
        let record = |device: &&CudaDevice| device.cuda_stream().record_event(None);
        Ok(Self(devices.iter().map(record).collect::<std::result::Result<_, _>>().map_err(failed)?))
    }

    /// Makes what is enqueued on `stream` from now on wait for that work.
    #[cfg(feature = "nccl")]
    pub(crate) fn block_stream(&self, stream: &CudaStream) -> Result<()> {
        self.0.iter().try_for_each(|event| stream.wait(event)).map_err(failed)
    }

    pub(crate) fn wait(&self) -> Result<()> {
        self.0.iter().try_for_each(CudaEvent::synchronize).map_err(failed)
    }
}

/// Staging copy of a CUDA tensor's elements on the host.
pub(crate) struct StagedTensor<'a> {
    tensor: &'a Tensor,
    host: OnceCell<Pinned>,
    /// Whether the tensor's old elements are needed, because they are read or not all overwritten.
    keeps: bool,
    changed: bool,
}

impl<'a> StagedTensor<'a> {
    /// Returns `None` for a CPU tensor. `keeps` may be false if the tensor is overwritten from its first to its last
    /// element.
    pub(crate) fn of(tensor: &'a Tensor, keeps: bool) -> Option<Self> {
        tensor.device().is_cuda().then(|| Self { tensor, host: OnceCell::new(), keeps, changed: false })
    }

    pub(crate) fn read<R>(&self, range: Range<usize>, look: impl FnOnce(&[u8]) -> R) -> Result<R> {
        self.load()?;
        let host = self.host.get().ok_or_else(unusable)?;
        Ok(look(&host.bytes()[range]))
    }

    pub(crate) fn write<R>(&mut self, range: Range<usize>, change: impl FnOnce(&mut [u8]) -> R) -> Result<R> {
        self.load()?;
        self.changed = true;
        let host = self.host.get_mut().ok_or_else(unusable)?;
        Ok(change(&mut host.bytes_mut()[range]))
    }

    fn load(&self) -> Result<()> {
        if self.host.get().is_some() {
            return Ok(());
        }
        let Device::Cuda(device) = self.tensor.device() else { return Err(unusable()) };
        let bytes = self.tensor.elem_count() * self.tensor.dtype().size_in_bytes();
        let mut host = Pinned::new(device.cuda_stream().context(), bytes)?;
        if self.keeps {
            download(self.tensor, host.bytes_mut())?;
        }
        self.host.get_or_init(|| host);
        Ok(())
    }

    /// Copies the elements back to the tensor, if they were changed.
    pub(crate) fn finish(self) -> Result<()> {
        let Some(host) = self.host.get().filter(|_| self.changed) else { return Ok(()) };
        self.tensor.inplace_op1(&Upload(host.bytes())).map_err(|source| Error::Tensor {
            operation: "writing into a CUDA tensor".into(),
            source: Arc::new(source),
        })
    }
}

/// Copies the elements of a tensor to the host.
fn download(tensor: &Tensor, to: &mut [u8]) -> Result<()> {
    let (storage, layout) = tensor.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        return Err(unusable());
    };
    let stream = stream_of(storage.device()).map_err(failed)?;
    macro_rules! copy {
        ($data:expr) => {
            stream.memcpy_dtoh(&$data.slice(start..end), bytemuck::cast_slice_mut(to))
        };
    }
    match &storage.slice {
        CudaStorageSlice::F64(data) => copy!(data),
        CudaStorageSlice::F32(data) => copy!(data),
        CudaStorageSlice::F16(data) => copy!(data),
        CudaStorageSlice::BF16(data) => copy!(data),
        CudaStorageSlice::U8(data) => copy!(data),
        CudaStorageSlice::U32(data) => copy!(data),
        CudaStorageSlice::I64(data) => copy!(data),
        _ => return Err(unusable()),
    }
    .and_then(|()| stream.synchronize())
    .map_err(failed)
}

/// Copies host bytes into a tensor.
struct Upload<'a>(&'a [u8]);

impl InplaceOp1 for Upload<'_> {
    fn name(&self) -> &'static str {
        "comm"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        Err(unusable().into())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else { return Err(unusable().into()) };
        let stream = stream_of(storage.device()).map_err(failed)?;
        macro_rules! copy {
            ($data:expr) => {
                stream.memcpy_htod(bytemuck::cast_slice(self.0), &mut $data.slice_mut(start..end))
            };
        }
        let copied = match &mut storage.slice {
            CudaStorageSlice::F64(data) => copy!(data),
            CudaStorageSlice::F32(data) => copy!(data),
            CudaStorageSlice::F16(data) => copy!(data),
            CudaStorageSlice::BF16(data) => copy!(data),
            CudaStorageSlice::U8(data) => copy!(data),
            CudaStorageSlice::U32(data) => copy!(data),
            CudaStorageSlice::I64(data) => copy!(data),
            _ => return Err(unusable().into()),
        };
        Ok(copied.and_then(|()| stream.synchronize()).map_err(failed)?)
    }
}

/// Returns the CUDA stream on which a device's tensors are copied. Created once per device.
fn stream_of(device: &CudaDevice) -> std::result::Result<Arc<CudaStream>, DriverError> {
    static STREAMS: Mutex<Vec<Arc<CudaStream>>> = Mutex::new(Vec::new());
    let own = device.cuda_stream();
    let mut streams = lock(&STREAMS);
    if let Some(known) = streams.iter().find(|stream| stream.context() == own.context()) {
        return Ok(known.clone());
    }
    let stream = own.context().new_stream()?;
    streams.push(stream.clone());
    Ok(stream)
}

fn failed(error: DriverError) -> Error {
    Error::system("copying between a CUDA device and the host", error)
}

fn unusable() -> Error {
    Error::invalid("a tensor", "one that is not contiguous on a CUDA device", "call `contiguous()` first")
}
