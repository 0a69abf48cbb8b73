//! What a model in a layout can be told.

use std::fmt;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use ddp::DdpConfig;
use fsdp::FsdpConfig;
use pipeline::{ScheduleKind, Split};
use training::LossScalerConfig;
use training::build::Recompute;

/// Says by its name whether a parameter is trained.
pub type IsTrained = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// How a [`Parallel`](crate::Parallel) is built. The same on every rank.
#[derive(Clone)]
pub struct ParallelConfig {
    /// Of parameters. Default: f32.
    pub dtype: DType,
    /// Where parameters are. Default: the CPU.
    pub device: Device,
    /// Equal parts of a rank's rows, one after the other, of which the gradients are added: a pipeline's micro-batches, accumulation
    /// elsewhere. Default: 1.
    pub micro_batches: usize,
    /// With `pp`: an input of one micro-batch, for its shape and dtype. Default: none.
    pub example: Option<Tensor>,
    /// With `pp`: the order of work. Default: 1F1B.
    pub schedule: ScheduleKind,
    /// With `pp`: where the model is cut. Default: so that the stage with most parameters has as few as possible.
    pub split: Split,
    /// With `dp`: how gradients are grouped and averaged. Its [`buffers`](DdpConfig::buffers), and those of `fsdp`, are what is state and not
    /// a parameter in all layouts.
    pub ddp: DdpConfig,
    /// With `shard` and without `pp`: what is sharded, and in which precision.
    pub fsdp: FsdpConfig,
    /// Which units keep nothing for backward but their input, and are computed again there. Losses and gradients are the same, to the
    /// bit. Default: none.
    pub recompute: Recompute,
    /// With `tp`: whether each rank has a part of every sequence only between divided layers, so that norms and what they keep are divided,
    /// too. As many bytes travel. The length of sequences must be a multiple of `tp`. Default: false.
    pub sequence_parallel: bool,
    /// Whether losses are scaled, so that small gradients of f16 do not vanish: a step in which a gradient of any rank is not finite is
    /// skipped by all. Default: none.
    pub loss_scale: Option<LossScalerConfig>,
    /// Of the random numbers of rows, such as dropout's. Default: 0.
    pub seed: u64,
    /// Which parameters are trained, by name; the others get no optimizer. Default: all.
    pub is_trained: Option<IsTrained>,
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            device: Device::Cpu,
            micro_batches: 1,
            example: None,
            schedule: ScheduleKind::OneFOneB,
            split: Split::default(),
            ddp: DdpConfig::default(),
            fsdp: FsdpConfig::default(),
            recompute: Recompute::default(),
            sequence_parallel: false,
            loss_scale: None,
            seed: 0,
            is_trained: None,
        }
    }
}

impl ParallelConfig {
    pub(crate) fn is_trained(&self, name: &str) -> bool {
        self.is_trained.as_ref().is_none_or(|is_trained| is_trained(name))
    }

    /// Whether a variable is state and not a parameter.
    pub(crate) fn is_buffer(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        self.ddp.buffers.iter().chain(&self.fsdp.buffers).any(|buffer| buffer == last)
    }
}

impl fmt::Debug for ParallelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, device, micro_batches, schedule, split, ddp, fsdp, .. } = self;
        let Self { recompute, sequence_parallel, loss_scale, seed, .. } = self;
        f.debug_struct("ParallelConfig")
            .field("dtype", dtype)
            .field("device", device)
            .field("micro_batches", micro_batches)
            .field("schedule", schedule)
            .field("split", split)
            .field("ddp", ddp)
            .field("fsdp", fsdp)
            .field("recompute", recompute)
            .field("sequence_parallel", sequence_parallel)
            .field("loss_scale", loss_scale)
            .field("seed", seed)
            .finish_non_exhaustive()
    }
}
