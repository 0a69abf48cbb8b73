//! How a model is spread over ranks.

use pipeline::ScheduleKind;
use serde::{Deserialize, Serialize};

use super::Group;

/// What the data-parallel ranks keep of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharding {
    /// All of it.
    #[default]
    None,
    /// A part: of so many ranks next to each other, which have the whole together; the others have copies of that.
    Over(usize),
}

/// Ranks in `pp` stages of `dp` copies of `tp` parts of each layer; those of one layer are next to each other, then copies, then
/// stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Ranks that divide the batch.
    pub dp: usize,
    /// Ranks that divide each layer.
    pub tp: usize,
    /// Stages.
    pub pp: usize,
    /// What data-parallel ranks keep; without pipeline parallelism.
    pub sharding: Sharding,
    /// Whether gathered parameters stay from forward to backward.
    pub stays_gathered: bool,
    /// Whether tensor-parallel ranks divide what is between the layers, too.
    pub sequence_parallel: bool,
    /// The order of work in a pipeline.
    pub schedule: ScheduleKind,
    /// Parts of a batch in a pipeline.
    pub micro_batches: usize,
    /// Bytes of gradients that travel together.
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
    /// Copies.
    pub fn ddp(dp: usize) -> Self {
        Self { dp, ..Self::default() }
    }

    /// Parameters divided over all.
    pub fn fsdp(dp: usize) -> Self {
        Self { dp, sharding: Sharding::Over(dp), ..Self::default() }
    }

    /// Parameters divided over neighbours, copies of that.
    pub fn hybrid(shards: usize, copies: usize) -> Self {
        Self { dp: shards * copies, sharding: Sharding::Over(shards), ..Self::default() }
    }

    /// Layers divided, copies of that.
    pub fn tensor(tp: usize, dp: usize) -> Self {
        Self { tp, dp, ..Self::default() }
    }

    /// Stages, of copies, of divided layers, with 1F1B.
    pub fn pipeline(pp: usize, dp: usize, tp: usize, micro_batches: usize) -> Self {
        Self { pp, dp, tp, micro_batches, ..Self::default() }
    }

    /// All ranks.
    pub fn ranks(&self) -> usize {
        self.dp * self.tp * self.pp
    }

    /// The ranks that divide a layer.
    pub(super) fn tensor_group(&self) -> Group {
        Group { ranks: self.tp, stride: 1 }
    }

    /// The ranks whose gradients are averaged by all-reduce.
    pub(super) fn copies(&self) -> Group {
        match self.sharding {
            Sharding::None => Group { ranks: self.dp, stride: self.tp },
            Sharding::Over(shards) => Group { ranks: self.dp / shards.max(1), stride: shards * self.tp },
        }
    }

    /// The ranks that divide the parameters.
    pub(super) fn shards(&self) -> Group {
        match self.sharding {
            Sharding::None => Group { ranks: 1, stride: 1 },
            Sharding::Over(ranks) => Group { ranks, stride: self.tp },
        }
    }
}
