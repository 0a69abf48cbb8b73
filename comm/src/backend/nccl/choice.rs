//! Choice of backend: NCCL where all ranks can use it, TCP otherwise.

use std::sync::Arc;

use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::backend::cuda_library::CudaLibrary;
use crate::base::members::Members;
use crate::{Communicator, Error, Result, Tcp, TcpConfig, all_gather_object};

use super::{Nccl, uuid};

/// What a rank has that NCCL needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct NcclSupport {
    /// The GPU that holds its tensors.
    gpu: Option<Vec<u8>>,
    /// Why it cannot load NCCL; None where it can.
    problem: Option<String>,
}

/// Why the ranks do not use NCCL.
#[derive(Debug, PartialEq, Eq)]
enum FallbackReason {
    /// Expected (all ranks on the CPU, or shared GPUs): no warning.
    Plain,
    /// Something the user may want to fix: a warning.
    Odd(String),
}

impl Nccl {
    /// Joins the group, with NCCL where each rank has a CUDA device that no other rank has, and NCCL's library can be
    /// used on all of them; otherwise with [`Tcp`], on all ranks alike. A warning says which rank lacks what, unless no
    /// rank has a GPU, or ranks share GPUs.
    ///
    /// # Cost
    /// That of a [`Tcp`] group and an all-gather of a few bytes; where NCCL is chosen, also that of [`Nccl::connect`].
    ///
    /// # Errors
    /// Those of [`Tcp::connect`] and [`Nccl::connect`].
    pub fn connect_or_tcp(config: &TcpConfig, device: &Device) -> Result<Arc<dyn Communicator>> {
        let tcp = Tcp::connect(config)?;
        let means = all_gather_object(&tcp, &NcclSupport::of(device)?)?;
        let Device::Cuda(device) = device else {
            return Ok(warn_and_use_tcp(obstacle(&means), tcp));
        };
        if let Some(obstacle) = obstacle(&means) {
            return Ok(warn_and_use_tcp(Some(obstacle), tcp));
        }
        let ranks: Vec<usize> = (0..tcp.world_size()).collect();
        let (config, meeting, _) = tcp.rendezvous(&ranks)?;
        Ok(Arc::new(Self::join(config, meeting, Members::world(ranks.len()), device)?))
    }
}

/// Logs the warning, on rank 0 only, and returns the TCP group.
fn warn_and_use_tcp(obstacle: Option<FallbackReason>, tcp: Tcp) -> Arc<dyn Communicator> {
    if let (Some(FallbackReason::Odd(why)), 0) = (obstacle, tcp.rank()) {
        tracing::warn!("data go over TCP, not by NCCL: {why}");
    }
    Arc::new(tcp)
}

impl NcclSupport {
    fn of(device: &Device) -> Result<Self> {
        let Device::Cuda(device) = device else { return Ok(Self::default()) };
        let problem = CudaLibrary::Nccl.load().err().as_ref().map(Error::to_string);
        Ok(Self { gpu: Some(uuid(device)?), problem })
    }
}

/// Returns the first reason why the ranks cannot use NCCL; None where all can.
fn obstacle(means: &[NcclSupport]) -> Option<FallbackReason> {
    let with_gpu = means.iter().position(|means| means.gpu.is_some());
    let without = means.iter().position(|means| means.gpu.is_none());
    let shares = |(rank, own): (usize, &NcclSupport)| means[..rank].iter().any(|other| other.gpu == own.gpu);
    match (with_gpu, without) {
        (None, _) => Some(FallbackReason::Plain),
        (Some(gpu), Some(cpu)) => Some(FallbackReason::Odd(format!(
            "rank {gpu} has its tensors on a GPU, and rank {cpu} on the CPU"
        ))),
        (Some(_), None) if means.iter().enumerate().any(shares) => Some(FallbackReason::Plain),
        (Some(_), None) => means.iter().enumerate().find_map(|(rank, means)| {
            let problem = means.problem.as_ref()?;
            Some(FallbackReason::Odd(format!("on rank {rank} {problem}")))
        }),
    }
}
