//! Layout of a model over ranks, for the time forecast.

use pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};

use super::Group;

/// What each data-parallel rank keeps of the parameters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharding {
    /// All parameters.
    #[default]
    None,
    /// A shard: each group of so many neighbouring ranks holds the whole model, and groups are replicas.
    Over(usize),
}

/// Layout of ranks: `pp` stages, each of `dp` replicas, each divided over `tp` ranks. Neighbouring ranks differ first
/// in `tp`, then in `dp`, then in `pp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Number of ranks that divide the batch.
    pub dp: usize,
    /// Number of ranks that divide each layer.
    pub tp: usize,
    /// Number of pipeline stages.
    pub pp: usize,
    /// What data-parallel ranks keep; only without pipeline parallelism.
    pub sharding: Sharding,
    /// Whether gathered parameters are kept from forward to backward.
    pub stays_gathered: bool,
    /// Whether tensor-parallel ranks also divide activations between the layers (sequence parallelism).
    pub sequence_parallel: bool,
    /// Pipeline schedule.
    pub schedule: ScheduleKind,
    /// Number of micro-batches in a pipeline.
    pub micro_batches: usize,
    /// Bytes of a gradient bucket.
    pub bucket_bytes: usize,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            dp: 1,
            tp: 1,
            pp: 1,
            sharding: Sharding::None,
            stays_gathered: false,
            sequence_parallel: false,
            schedule: ScheduleKind::OneFOneB,
            micro_batches: 1,
            bucket_bytes: ddp::DdpConfig::default().bucket_bytes,
        }
    }
}

impl Layout {
    /// Data parallelism with replicas.
    pub fn ddp(dp: usize) -> Self {
        Self { dp, ..Self::default() }
    }

    /// Data parallelism with parameters sharded over all ranks.
    pub fn fsdp(dp: usize) -> Self {
        Self { dp, sharding: Sharding::Over(dp), ..Self::default() }
    }

    /// Hybrid sharding: shards over neighbouring ranks, and replicas of these groups.
    pub fn hybrid(shards: usize, copies: usize) -> Self {
        Self { dp: shards * copies, sharding: Sharding::Over(shards), ..Self::default() }
    }

    /// Tensor parallelism, with replicas.
    pub fn tensor(tp: usize, dp: usize) -> Self {
        Self { tp, dp, ..Self::default() }
    }

    /// Pipeline of 1F1B schedule, with replicas and tensor parallelism in each stage.
    pub fn pipeline(pp: usize, dp: usize, tp: usize, micro_batches: usize) -> Self {
        Self { pp, dp, tp, micro_batches, ..Self::default() }
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.dp * self.tp * self.pp
    }

    /// Returns the group of ranks that divide a layer.
    pub(super) fn tensor_group(&self) -> Group {
        Group { ranks: self.tp, stride: 1 }
    }

    /// Returns the group of ranks that average gradients by all-reduce.
    pub(super) fn copies(&self) -> Group {
        match self.sharding {
            Sharding::None => Group { ranks: self.dp, stride: self.tp },
            Sharding::Over(shards) => Group { ranks: self.dp / shards.max(1), stride: shards * self.tp },
        }
    }

    /// Returns the group of ranks that divide the parameters.
    pub(super) fn shards(&self) -> Group {
        match self.sharding {
            Sharding::None => Group { ranks: 1, stride: 1 },
            Sharding::Over(ranks) => Group { ranks, stride: self.tp },
        }
    }
}
