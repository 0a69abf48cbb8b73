//! Configuration of a model in a layout.

use std::fmt;
use std::sync::Arc;

use super::ExpertBalance;
use candle_core::{DType, Device, Tensor};
use ddp::DdpConfig;
use fsdp::FsdpConfig;
use pipeline::{ScheduleKind, Split};
use training::build::Recompute;
use training::internal::is_buffer;
use training::{AuditConfig, LossScalerConfig};

/// Decides by its name whether a parameter is trained.
pub type IsTrained = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Configuration of a [`Parallel`](crate::Parallel). Must be the same on every rank.
#[derive(Clone)]
pub struct ParallelConfig {
    /// Data type of the parameters. Default: f32.
    pub dtype: DType,
    /// Device of the parameters. Default: the CPU.
    pub device: Device,
    /// Number of equal parts into which a rank's rows are divided. They are computed one after the other, and their
    /// gradients are added: the micro-batches of a pipeline, gradient accumulation elsewhere. Default: 1.
    pub micro_batches: usize,
    /// With `pp`: an input of one micro-batch, for its shape and dtype, which all batches then have. Default: none, which takes
    /// that of the first batch.
    pub example: Option<Tensor>,
    /// With `pp`: the pipeline schedule. Default: 1F1B.
    pub schedule: ScheduleKind,
    /// With `pp`: how units are assigned to stages. Default: so that the largest stage has as few parameters as
    /// possible.
    pub split: Split,
    /// With `dp`: how gradients are grouped and averaged. In all layouts, its [`buffers`](DdpConfig::buffers) and those
    /// of `fsdp` name the variables that are state and not parameters.
    pub ddp: DdpConfig,
    /// With `shard` and without `pp`: what is sharded, and in which precision.
    pub fsdp: FsdpConfig,
    /// Which units are recomputed in backward and keep only their input (activation checkpointing). Losses and
    /// gradients are the same, to the bit. Default: none.
    pub recompute: Recompute,
    /// With `tp`: sequence parallelism. Between divided layers each rank has a part of every sequence, so that norms
    /// and their activations are divided, too. The communication volume is the same. The length of sequences must be a
    /// multiple of `tp`. Default: false.
    pub sequence_parallel: bool,
    /// Loss scaling, so that small gradients of f16 do not underflow. A step in which a gradient of any rank is not
    /// finite is skipped on all ranks. A rank's gradient before it is averaged is as large as that of its own rows alone, so
    /// that with more ranks of `dp` and `shard` it overflows at a smaller scale, as in PyTorch. Default: none.
    pub loss_scale: Option<LossScalerConfig>,
    /// Seed of the random numbers of rows, such as dropout's. Default: 0.
    pub seed: u64,
    /// What happens to parameters that have no gradient on any rank after the first step; replaces the `audit` of `ddp` and
    /// `fsdp`. With `shard` and without `pp`, a model with parameters that are not trained is not checked. Default: a warning.
    pub audit: AuditConfig,
    /// How experts are balanced, and that their loads are counted. Default: neither.
    pub balance: Option<ExpertBalance>,
    /// Decides which parameters are trained; the others are not given to the optimizer. Default: all are trained.
    pub is_trained: Option<IsTrained>,
    /// With `far`: the number of groups with which an elastic run is to go on, if the layout has fewer since some were lost before the first
    /// step. A batch is divided by it, and new groups may take the places of lost ones; it may be that of a layout with one group. Default: 1,
    /// as many as the layout has.
    pub far_groups: usize,
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
            audit: AuditConfig::default(),
            balance: None,
            is_trained: None,
            far_groups: 1,
        }
    }
}

impl ParallelConfig {
    /// A copy whose strategies check for missing gradients as the whole does.
    pub(crate) fn of_strategies(&self) -> Self {
        let mut config = self.clone();
        config.ddp.audit = config.audit.clone();
        config.fsdp.audit = config.audit.clone();
        config
    }

    pub(crate) fn is_trained(&self, name: &str) -> bool {
        self.is_trained.as_ref().is_none_or(|is_trained| is_trained(name))
    }

    /// Whether a variable is state and not a parameter.
    pub(crate) fn is_buffer(&self, name: &str) -> bool {
        [&self.ddp.buffers, &self.fsdp.buffers].into_iter().any(|buffers| is_buffer(buffers, name))
    }

    /// Last components of the names of state.
    pub(crate) fn buffers(&self) -> impl Iterator<Item = &str> {
        self.ddp.buffers.iter().chain(&self.fsdp.buffers).map(String::as_str)
    }
}

impl fmt::Debug for ParallelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { dtype, device, micro_batches, schedule, split, ddp, fsdp, .. } = self;
        let Self { recompute, sequence_parallel, loss_scale, seed, audit, balance, far_groups, .. } = self;
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
            .field("audit", audit)
            .field("balance", balance)
            .field("far_groups", far_groups)
            .finish_non_exhaustive()
    }
}
