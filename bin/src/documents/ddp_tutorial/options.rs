//! The options of `ddp-transformer`.

use clap::{Args, ValueEnum};
use cli::prelude::*;
use ops::AttentionMask;

use crate::documents::shared::transformer::TransformerConfig;
use crate::documents::shared::transformer::options::TransformerOptions;

/// Tokens that a token attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mask {
    /// Later tokens only; the last one attends to all. The tutorial's.
    Document,
    /// Itself and earlier ones, as a model that predicts the next token must.
    Causal,
    /// All.
    None,
}

impl From<Mask> for AttentionMask {
    fn from(mask: Mask) -> Self {
        match mask {
            Mask::Document => AttentionMask::AntiCausal,
            Mask::Causal => AttentionMask::Causal,
            Mask::None => AttentionMask::Full,
        }
    }
}

/// Options of `ddp-transformer`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a Transformer to predict the next token, on --world-size ranks with averaged gradients. Rank 0
prints its loss at every step. Each row of the data set is one token, repeated.

The module tree that is printed first is that of the trained model. With the tutorial's own sizes it is
the tree that the tutorial prints instead, which is that of a larger model.

--data FILE holds the tensor tokens, i64 of shape (rows, length). --init and --save hold PyTorch's
state_dict: embedding.weight, pos_encoding.pe, layers.0.attention.q_linear.weight and so on.

  girandole ddp-transformer --elastic 2:4 --replace 2")]
pub(crate) struct DdpTransformerOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    #[command(flatten)]
    pub(crate) elastic: ElasticOptions,
    /// How batches are loaded.
    #[command(flatten)]
    pub(crate) loader: LoaderOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "200", value_parser = count)]
    pub(crate) epochs: usize,
    /// Rows per step, on each rank
    #[arg(long, value_name = "N", default_value = "2", value_parser = count)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.01", value_parser = learning_rate)]
    pub(crate) lr: f64,
    /// Tokens that a token attends to
    #[arg(long, value_enum, default_value = "document")]
    pub(crate) mask: Mask,
    /// Use a new order in each epoch; the tutorial uses one for all
    #[arg(long)]
    pub(crate) reshuffle: bool,
    /// The data set and the model.
    #[command(flatten)]
    pub(crate) sizes: TransformerOptions,
}

impl DdpTransformerOptions {
    pub(super) fn model(&self) -> TransformerConfig {
        TransformerConfig { mask: self.mask.into(), ..self.sizes.config() }
    }
}
