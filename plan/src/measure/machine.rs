//! Measurement of a machine's network, compute and memory speed, with two ranks.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::Optimizer;
use comm::{Communicator, Result};
use serde::{Deserialize, Serialize};
use training::{Adam, AdamConfig};

use super::{Measured, measure};

const FEW: usize = 4 << 10;
const MANY: usize = 16 << 20;
const TIME: Duration = Duration::from_millis(200);

/// Speeds measured with two ranks.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Machine {
    /// Bytes per second that a rank sends.
    pub bandwidth: f64,
    /// Latency of one communication step, in seconds.
    pub latency: f64,
    /// FLOP/s of a rank in f32 matrix products.
    pub flops: f64,
    /// Bytes per second that a rank's Adam reads and writes.
    pub memory_bandwidth: f64,
}

impl Machine {
    /// Measures. Both ranks of the group must call it; each returns its own figures.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn measure(comm: &dyn Communicator) -> Result<Self> {
        let time = |bytes| measure(comm, Measured::AllReduce, bytes, (DType::F32, &Device::Cpu), None, TIME);
        // An all-reduce of two ranks: one step for a small buffer; two steps, with half of the buffer each, for a
        // large one.
        let latency = time(FEW)?.s;
        let many = time(MANY)?.s;
        let bandwidth = MANY as f64 / (many - 2.0 * latency).max(many / 2.0);
        comm.barrier()?.wait()?;
        let flops = flops()?;
        comm.barrier()?.wait()?;
        let memory_bandwidth = memory_bandwidth()?;
        Ok(Self { bandwidth, latency, flops, memory_bandwidth })
    }
}

/// Measures FLOP/s of a product with the shape of a linear layer.
fn flops() -> Result<f64> {
    let (rows, inputs, outputs) = (256, 1024, 1024);
    let x = Tensor::ones((rows, inputs), DType::F32, &Device::Cpu)?;
    let weight = Tensor::ones((outputs, inputs), DType::F32, &Device::Cpu)?;
    let seconds = seconds_per_call(|| x.matmul(&weight.t()?).map(drop))?;
    Ok((2 * rows * inputs * outputs) as f64 / seconds)
}

/// Measures the memory bandwidth of an Adam step on more data than fits in a cache.
fn memory_bandwidth() -> Result<f64> {
    let parameters = 4 << 20;
    let var = Var::zeros(parameters, DType::F32, &Device::Cpu)?;
    let mut grads = var.sum_all()?.backward()?;
    grads.insert(&var, Tensor::ones(parameters, DType::F32, &Device::Cpu)?);
    let mut adam = Adam::new(vec![var], AdamConfig::default())?;
    let seconds = seconds_per_call(|| adam.step(&grads))?;
    // Parameter and both moments are read and written, the gradient is read.
    Ok((7 * parameters * size_of::<f32>()) as f64 / seconds)
}

/// Returns the mean seconds of a call, after one warm-up call.
fn seconds_per_call(mut call: impl FnMut() -> candle_core::Result<()>) -> Result<f64> {
    call()?;
    let (began, mut count) = (Instant::now(), 0);
    while count < 3 || began.elapsed() < TIME {
        call()?;
        count += 1;
    }
    Ok(began.elapsed().as_secs_f64() / f64::from(count))
}
