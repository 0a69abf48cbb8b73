//! The options of `tensor-parallel-transformer`.

use clap::Args;
use cli::prelude::*;
use ops::AttentionMask;
use plan::command::check_heads;
use tensor_parallel::LanguageModelConfig;

use crate::documents::handbook::tensor_parallel::mesh::{MeshOptions, memory_per_rank};
use crate::documents::shared::transformer::options::check_room;
use crate::documents::shared::transformer::rows::check_length;

/// Options of `tensor-parallel-transformer`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a language model to predict the next token, with Adam. Attention heads, feed-forward layers,
embedding and logits are divided over --tp ranks; there are --dp such groups, each with its own
batches. If --tp does not divide --vocab-size, the first ranks have one token more. At the end it
prints what each rank held and sent, as measured, and what it would hold and send with a copy of the
whole model on each rank.

--data FILE holds the tensor tokens, i64 of shape (rows, length). --init and --save hold PyTorch's
state_dict of the whole model: embedding.weight, position.weight, layers.0.norm1.weight,
layers.0.attention.qkv.weight and so on. Without --data, each row starts at a random token and counts
up by 1 to 4.

  girandole tensor-parallel-transformer --world-size 4 --tp 2")]
pub struct TensorParallelTransformerOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) mesh: MeshOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "10", value_parser = count)]
    pub(crate) epochs: usize,
    /// Rows per step, on each data-parallel rank
    #[arg(long, value_name = "N", default_value = "8", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.001", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Rows in the data set
    #[arg(long, value_name = "N", default_value = "64", value_parser = count, conflicts_with = "data")]
    pub(crate) samples: usize,
    /// Tokens in a row
    #[arg(long, value_name = "N", default_value = "33", value_parser = count, conflicts_with = "data")]
    pub(crate) length: usize,
    /// Dropout: the probability of zeroing a number
    #[arg(long, value_name = "P", default_value = "0", value_parser = probability, help_heading = "Model")]
    pub(crate) dropout: f64,
    /// Let each token attend to all others, not only to earlier ones
    #[arg(long, help_heading = "Model")]
    pub(crate) no_mask: bool,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N", default_value = "256", value_parser = count, help_heading = "Model")]
    pub(crate) vocab_size: usize,
    /// Features of a token
    #[arg(long, value_name = "N", default_value = "128", value_parser = count, help_heading = "Model")]
    pub(crate) d_model: usize,
    /// Attention heads
    #[arg(long, value_name = "N", default_value = "8", value_parser = count, help_heading = "Model")]
    pub(crate) num_heads: usize,
    /// Width of the feed-forward layers [default: four times --d-model]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub(crate) d_ff: Option<usize>,
    /// Layers
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, help_heading = "Model")]
    pub(crate) num_layers: usize,
    /// Positions: the longest row of tokens that the model takes
    #[arg(long, value_name = "N", default_value = "64", value_parser = count, help_heading = "Model")]
    pub(crate) max_len: usize,
}

impl TensorParallelTransformerOptions {
    pub(super) fn model(&self) -> LanguageModelConfig {
        let &Self { vocab_size, d_model, num_heads, num_layers, max_len, dropout, .. } = self;
        let mask = if self.no_mask { AttentionMask::Full } else { AttentionMask::Causal };
        let d_ff = self.d_ff.unwrap_or(0);
        LanguageModelConfig { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, mask }
    }

    /// Checks that the model fits in memory.
    fn check_memory(&self, world_size: usize, tp: usize) -> Result<()> {
        let sizes = [
            ("--d-model", self.d_model),
            ("--vocab-size", self.vocab_size),
            ("--num-layers", self.num_layers),
            ("--max-len", self.max_len),
            ("--d-ff", self.d_ff.unwrap_or(0)),
        ];
        // Position embeddings are replicated on all ranks.
        let positions = self.max_len as f64 * self.d_model as f64;
        let count = |[model, words, blocks, positions, ff]: [f64; 5]| {
            let ff = if self.d_ff.is_some() { ff } else { 4.0 * model };
            let block = 4.0 * model * model + 2.0 * model * ff + 9.0 * model + ff;
            2.0 * words * model + blocks * block + positions * model
        };
        memory_check::check_model(sizes, count, |all| {
            let bytes = |parts| {
                memory_check::with_adam(all - positions, parts) + memory_check::with_adam(positions, 1)
            };
            memory_per_rank(&self.common, world_size, tp, bytes)
        })
    }

    /// Checks that sizes are compatible with each other and divisible over the ranks.
    pub(super) fn check_sizes(&self, world_size: usize, tp: usize) -> Result<()> {
        let &Self { d_model, num_heads, .. } = self;
        check_heads(d_model, num_heads).or_else(|help| refuse("--d-model", d_model, help))?;
        self.check_memory(world_size, tp)?;
        MeshOptions::divides("--num-heads", num_heads, tp)?;
        if self.vocab_size < tp {
            let help =
                format!("it is divided over {tp} tensor-parallel ranks (--tp): give each one at least");
            return refuse("--vocab-size", self.vocab_size, help);
        }
        MeshOptions::divides("--d-ff", self.d_ff.unwrap_or(d_model.saturating_mul(4)), tp)?;
        if self.common.data.is_some() {
            return Ok(());
        }
        if let Err(help) = check_length(self.length, self.max_len) {
            return refuse("--length", self.length, help);
        }
        if self.mesh.sequence_parallel && !(self.length - 1).is_multiple_of(tp) {
            let help = format!(
                "with --sequence-parallel all its tokens except one are divided over {tp} ranks (--tp): give a \
                 multiple of {tp}, plus one"
            );
            return refuse("--length", self.length, help);
        }
        check_room(self.samples, self.length, &self.common, world_size)
    }
}
