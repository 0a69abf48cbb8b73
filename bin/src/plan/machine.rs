//! What this machine can do, measured between two processes.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, Tcp, TcpConfig};
use serde::{Deserialize, Serialize};

use crate::comm_bench::{Measured, measure};
use crate::error::{Error, Result};
use crate::start;

use super::NAME;

const FEW: usize = 4 << 10;
const MANY: usize = 16 << 20;
const TIME: Duration = Duration::from_millis(200);

/// What two ranks have measured.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Machine {
    /// Bytes a second that a rank sends.
    pub(super) bandwidth: f64,
    /// Seconds of a step.
    pub(super) latency: f64,
    /// Operations a second of a rank, of matrix products in f32.
    pub(super) flops: f64,
}

impl Machine {
    /// Starts two ranks that measure.
    pub(super) fn measured() -> Result<Self> {
        start::spawn(NAME, 2, None)
    }

    /// Measures, as one of them.
    pub(super) fn rank() -> Result<()> {
        let config = TcpConfig::from_env()?;
        let in_rank = |source| Error::in_rank(config.rank, source);
        let measure = || -> Result<Option<Machine>> {
            let comm = Tcp::connect(&config)?;
            let time =
                |bytes| measure(&comm, Measured::AllReduce, bytes, (DType::F32, &Device::Cpu), None, TIME);
            // One step of few bytes; two of many, half of the buffer each.
            let latency = time(FEW)?.s;
            let many = time(MANY)?.s;
            let bandwidth = MANY as f64 / (many - 2.0 * latency).max(many / 2.0);
            comm.barrier()?.wait()?;
            let flops = flops()?;
            Ok((comm.rank() == 0).then_some(Machine { bandwidth, latency, flops }))
        };
        match measure().map_err(in_rank)? {
            Some(machine) => start::hand_over(&machine),
            None => Ok(()),
        }
    }
}

/// Of products as a layer computes them.
fn flops() -> Result<f64> {
    let (rows, inputs, outputs) = (256, 1024, 1024);
    let x = Tensor::ones((rows, inputs), DType::F32, &Device::Cpu)?;
    let weight = Tensor::ones((outputs, inputs), DType::F32, &Device::Cpu)?;
    let product = || x.matmul(&weight.t()?);
    product()?;
    let (began, mut count) = (Instant::now(), 0);
    while count < 3 || began.elapsed() < TIME {
        product()?;
        count += 1;
    }
    Ok((2 * rows * inputs * outputs * count) as f64 / began.elapsed().as_secs_f64())
}
