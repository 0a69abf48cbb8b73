//! The options of `fsdp-mlp`.

use candle_core::DType;
use clap::{Args, ValueEnum};
use cli::prelude::*;
use fsdp::{FsdpConfig, MixedPrecision, ShardingStrategy};

use super::model::{CLASSES, LargeConfig};

/// What is sharded, by the names of PyTorch's `ShardingStrategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sharding {
    /// Parameters, gradients and optimizer state.
    FullShard,
    /// Gradients and optimizer state; parameters stay from forward to backward.
    ShardGradOp,
    /// Nothing: gradients are averaged as in data parallelism.
    NoShard,
    /// All three within groups of --shard-ranks; groups are copies of each other.
    HybridShard,
}

/// What numbers are computed or sent in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FloatKind {
    /// 32 bits.
    F32,
    /// 16 bits, of which 10 are digits.
    F16,
    /// 16 bits, of which 7 are digits: the range of f32.
    Bf16,
}

impl FloatKind {
    pub(super) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Options of `fsdp-mlp`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains Linear(1024, 4096), Linear(4096, 4096), Linear(4096, 1024), Linear(1024, 10) with
cross-entropy and Adam, sharded over --world-size ranks: each keeps a part of the parameters, of their
gradients and of Adam's state, and gathers a layer only while it runs. Each rank draws a random batch
for each step; rank 0 prints its loss at every tenth step. At the end it prints the most memory that
each rank held.

Whatever type the layers compute in, logits become f32 before the loss, as with
output_dtype=torch.float32 of PyTorch's MixedPrecisionPolicy. The handbook takes the loss of f16
logits in f16, which has 3 digits.

--data FILE holds the tensors x, f32 of shape (samples, features), and y, i64 of shape (samples) with
classes 0 to 9; they are divided over the ranks and shuffled. --init and --save hold layer1.weight
(hidden, features), layer1.bias and so on to layer4. Each rank reads only its part, and no rank has the
whole model.

  girandole fsdp-mlp --sharding hybrid-shard --shard-ranks 2 --world-size 4")]
pub struct FsdpMlpOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    /// Steps
    #[arg(long, value_name = "N", default_value = "100", value_parser = count)]
    pub(crate) steps: usize,
    /// Samples per step, on each rank
    #[arg(long, value_name = "N", default_value = "16", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.001", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Features of a sample
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count)]
    pub(crate) features: usize,
    /// Width of the second and third layer
    #[arg(long, value_name = "N", default_value = "4096", value_parser = count)]
    pub(crate) hidden: usize,
    /// What is sharded
    #[arg(long, value_enum, default_value = "full-shard", help_heading = "Sharding")]
    pub(crate) sharding: Sharding,
    /// Ranks per copy of the model, with --sharding hybrid-shard
    #[arg(long, value_name = "N", value_parser = count, required_if_eq("sharding", "hybrid-shard"), help_heading = "Sharding")]
    pub(crate) shard_ranks: Option<usize>,
    /// Type that layers compute in
    ///
    /// Shards and Adam's state are f32.
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f16", help_heading = "Sharding")]
    pub(crate) param_dtype: FloatKind,
    /// Type of averages [default: --param-dtype]
    ///
    /// Gradients are averaged in it.
    #[arg(long, value_name = "TYPE", value_enum, help_heading = "Sharding")]
    pub(crate) reduce_dtype: Option<FloatKind>,
    /// Type of buffers
    ///
    /// They are state that is not trained; this model has none.
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32", help_heading = "Sharding")]
    pub(crate) buffer_dtype: FloatKind,
    /// Scale the loss, at first by this factor (such as 65536)
    ///
    /// Scaling keeps small gradients from vanishing. When a gradient of any rank is not finite, all ranks skip that step and
    /// the factor is halved; after 2000 good steps it is doubled.
    #[arg(long, value_name = "FACTOR", value_parser = factor, help_heading = "Sharding")]
    pub(crate) loss_scale: Option<f64>,
}

fn factor(text: &str) -> std::result::Result<f64, &'static str> {
    let factor = text.parse().ok().filter(|factor: &f64| factor.is_finite() && *factor > 0.0);
    factor.ok_or("give a finite number greater than 0")
}

impl FsdpMlpOptions {
    pub(super) fn model(&self) -> LargeConfig {
        LargeConfig { features: self.features, hidden: self.hidden }
    }

    pub(super) fn config(&self) -> FsdpConfig {
        let reduce_dtype = self.reduce_dtype.unwrap_or(self.param_dtype);
        FsdpConfig {
            strategy: match self.sharding {
                Sharding::FullShard | Sharding::HybridShard => ShardingStrategy::FullShard,
                Sharding::ShardGradOp => ShardingStrategy::ShardGradOp,
                Sharding::NoShard => ShardingStrategy::NoShard,
            },
            mixed_precision: MixedPrecision {
                param_dtype: Some(self.param_dtype.dtype()),
                reduce_dtype: Some(reduce_dtype.dtype()),
                // Computing the loss from 16-bit logits would lose precision.
                output_dtype: Some(DType::F32),
            },
            buffer_dtype: Some(self.buffer_dtype.dtype()),
            ..FsdpConfig::default()
        }
    }

    /// Returns the number of shards that the model is cut into.
    pub(super) fn shards(&self, world_size: usize) -> usize {
        match self.sharding {
            Sharding::FullShard | Sharding::ShardGradOp => world_size,
            Sharding::NoShard => 1,
            Sharding::HybridShard => self.shard_ranks.unwrap_or(world_size),
        }
    }

    pub(super) fn check_sizes(&self, world_size: usize) -> Result<()> {
        if let (Some(ranks), false) = (self.shard_ranks, self.sharding == Sharding::HybridShard) {
            let help = "it needs --sharding hybrid-shard";
            return refuse("--shard-ranks", ranks, help);
        }
        let shards = self.shards(world_size);
        if !world_size.is_multiple_of(shards) {
            let help = format!("the {world_size} ranks cannot be divided into groups of that size");
            return refuse("--shard-ranks", shards, help);
        }
        if self.model().elements().is_none() {
            let help =
                format!("with --features {}, the model has more elements than can be counted", self.features);
            return refuse("--hidden", self.hidden, help);
        }
        let count = |[features, hidden]: [f64; 2]| {
            let layers =
                [(features, hidden), (hidden, hidden), (hidden, features), (features, CLASSES as f64)];
            layers.map(|(inputs, outputs)| (inputs + 1.0) * outputs).into_iter().sum::<f64>()
        };
        let sizes = [("--features", self.features), ("--hidden", self.hidden)];
        let CommonOptions { ranks, device, .. } = &self.common;
        let on_host = memory_check::ranks_on_host(ranks, *device, world_size).unwrap_or(1);
        memory_check::check_model(sizes, count, |all| (memory_check::with_adam(all, shards), on_host))?;
        // Features and a class, of 4 bytes each.
        let bytes = self.features.saturating_add(1).saturating_mul(4);
        memory_check::check_samples("--batch-size", self.batch_size, bytes, &self.common, world_size)
    }
}
