//! Fused operations on CUDA devices: their kernels (`kernels.cu`) and what launches them.
//!
//! Arguments are contiguous tensors of one device, of f32, f16 or bf16 ([`knows`]), and of the shapes that the callers have
//! checked. No graph is recorded.
#![allow(unsafe_code, reason = "kernels are launched")]

mod masks;
mod numbers;
mod rows;

use std::cell::Cell;

use candle_core::cuda::cudarc::driver::{CudaSlice, CudaView, DeviceRepr, LaunchConfig};
use candle_core::cuda::{CudaDType, CudaStorage};
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor, WithDType,
    bail,
};

pub(crate) use masks::{DeviceMask, Seen};
pub use numbers::adam;
pub(crate) use numbers::{activation, activation_backward, dropped, gated, gated_backward, rotary, swapped};
pub use rows::squares;
pub(crate) use rows::{
    attention_weights, attention_weights_backward, cross_entropy, layer_norm, layer_norm_backward, rms_norm,
    rms_norm_backward,
};

/// The kernels' code for the driver.
const KERNELS: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"));
const MODULE: &str = "girandole";
/// Threads of a block.
const THREADS: u32 = 256;

/// Whether these functions take the tensor.
pub fn knows(x: &Tensor) -> bool {
    x.device().is_cuda() && matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) && x.elem_count() > 0
}

/// A type of numbers that the kernels take.
trait Number: WithDType + CudaDType + DeviceRepr {}

impl Number for f32 {}
impl Number for half::f16 {}
impl Number for half::bf16 {}

/// Calls a function with the type of a dtype.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            candle_core::DType::F32 => $function::<f32>($($argument),*),
            candle_core::DType::F16 => $function::<half::f16>($($argument),*),
            candle_core::DType::BF16 => $function::<half::bf16>($($argument),*),
            other => candle_core::bail!("there are no kernels for {other:?}"),
        }
    };
}
use by_dtype;

/// Launches a kernel: what it reads, what it writes, and numbers, in the order of its parameters.
macro_rules! launch {
    ($device:expr, $name:expr, $config:expr, [$($read:expr),*], [$($written:expr),+], [$($number:expr),*]) => {{
        use candle_core::cuda::cudarc::driver::PushKernelArg as _;
        let function = $device.get_or_load_custom_func(&$name, crate::cuda::MODULE, crate::cuda::KERNELS)?;
        let mut arguments = function.builder();
        $(
            let read = $read;
            arguments.arg(&read);
        )*
        $(arguments.arg($written);)+
        $(
            let number = $number;
            arguments.arg(&number);
        )*
        // SAFETY: the arguments are the kernel's parameters in number, order and type, and its sizes are those of the slices.
        unsafe { arguments.launch($config) }.map_err(candle_core::Error::wrap)?;
    }};
}
use launch;

/// A kernel's name: the operation's, and the dtype's.
fn named<T: WithDType>(operation: &str) -> String {
    format!("{operation}_{}", T::DTYPE.as_str())
}

/// One block for each row.
fn by_row(rows: usize, width: usize) -> LaunchConfig {
    let threads = width.next_multiple_of(32).clamp(32, THREADS as usize);
    LaunchConfig { grid_dim: (rows as u32, 1, 1), block_dim: (threads as u32, 1, 1), shared_mem_bytes: 0 }
}

/// Threads for this many numbers, each for one of them, or for several where there are very many.
fn by_number(count: usize) -> LaunchConfig {
    const MOST_BLOCKS: usize = 1 << 20;
    let blocks = count.div_ceil(THREADS as usize).min(MOST_BLOCKS);
    LaunchConfig { grid_dim: (blocks as u32, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 }
}

fn device(x: &Tensor) -> Result<&CudaDevice> {
    match x.device() {
        Device::Cuda(device) => Ok(device),
        _ => bail!("a tensor is not on a CUDA device"),
    }
}

fn storage(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("a tensor is not on a CUDA device"),
    }
}

/// The numbers of a contiguous tensor.
fn numbers_of<'a, T: CudaDType>(storage: &'a CudaStorage, layout: &Layout) -> Result<CudaView<'a, T>> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("a tensor is not contiguous") };
    Ok(storage.as_cuda_slice::<T>()?.slice(start..end))
}

/// Memory for numbers that a kernel will write.
fn alloc<T: DeviceRepr>(device: &CudaDevice, count: usize) -> Result<CudaSlice<T>> {
    // SAFETY: the kernels write every number before any is read.
    unsafe { device.alloc(count) }
}

fn tensor<T: CudaDType>(numbers: CudaSlice<T>, device: &CudaDevice, shape: &Shape) -> Tensor {
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(numbers, device.clone()));
    Tensor::from_storage(storage, shape.clone(), BackpropOp::none(), false)
}

/// Changes a tensor in place.
fn in_place(x: &Tensor, change: impl FnOnce(&mut CudaStorage, &Layout) -> Result<()>) -> Result<()> {
    x.inplace_op1(&InPlace(Cell::new(Some(change))))
}

struct InPlace<F>(Cell<Option<F>>);

impl<F: FnOnce(&mut CudaStorage, &Layout) -> Result<()>> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "in place"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> Result<()> {
        bail!("a tensor is not on a CUDA device")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
        self.0.take().map_or(Ok(()), |change| change(storage, layout))
    }
}
