//! The options of commands that train a [`Transformer`](super::Transformer) on rows of equal tokens.

use std::path::Path;

use clap::Args;
use cli::prelude::*;
use plan::command::check_heads;

use crate::documents::shared::transformer::TransformerConfig;
use crate::documents::shared::transformer::rows::{self, Row, check_length};

/// Sizes of the tutorials' data set and model.
#[derive(Debug, Clone, Args)]
pub struct TransformerOptions {
    /// Rows in the data set
    #[arg(long, value_name = "N", default_value = "12", value_parser = count, conflicts_with = "data")]
    pub samples: usize,
    /// Tokens in a row
    #[arg(long, value_name = "N", default_value = "10", value_parser = count, conflicts_with = "data")]
    pub length: usize,
    /// Dropout: the probability of zeroing a number
    #[arg(long, value_name = "P", default_value = "0.1", value_parser = probability, help_heading = "Model")]
    pub dropout: f64,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N", default_value = "100", value_parser = count, help_heading = "Model")]
    pub vocab_size: usize,
    /// Features of a token
    #[arg(long, value_name = "N", default_value = "12", value_parser = count, help_heading = "Model")]
    pub d_model: usize,
    /// Attention heads
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, help_heading = "Model")]
    pub num_heads: usize,
    /// Width of the feed-forward layers
    #[arg(long, value_name = "N", default_value = "24", value_parser = count, help_heading = "Model")]
    pub d_ff: usize,
    /// Blocks (layers)
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, help_heading = "Model")]
    pub num_layers: usize,
    /// Positions: the longest row of tokens that the model takes
    #[arg(long, value_name = "N", default_value = "100", value_parser = count, help_heading = "Model")]
    pub max_len: usize,
}

impl TransformerOptions {
    /// Returns the model's configuration; each token attends to all.
    pub fn config(&self) -> TransformerConfig {
        let &Self { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, .. } = self;
        TransformerConfig {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers,
            max_len,
            dropout,
            ..TransformerConfig::default()
        }
    }

    /// Returns the rows of tokens, generated or read from the file of `--data`.
    ///
    /// # Errors
    /// More rows than there is memory for; a file that does not fit.
    pub fn rows(&self, data: Option<&Path>) -> Result<Vec<Row>> {
        match data {
            Some(path) => Ok(rows::read(path, self.vocab_size, self.max_len)?),
            None => Ok(rows::repeated(self.samples, self.length)?),
        }
    }

    /// Checks that sizes are compatible and fit in the memory of `world_size` ranks, with each copy of the model cut
    /// into `parts`. The sizes of the data set are not checked with `--data`, whose rows come from the file.
    ///
    /// # Errors
    /// The first option that cannot be used.
    pub fn check(&self, common: &CommonOptions, world_size: usize, parts: usize) -> Result<()> {
        let &Self { d_model, num_heads, .. } = self;
        check_heads(d_model, num_heads).or_else(|help| refuse("--d-model", d_model, help))?;
        if !d_model.is_multiple_of(2) {
            let help = "positions are encoded in pairs of sine and cosine: give an even number";
            return refuse("--d-model", d_model, help);
        }
        let ranks = memory_check::ranks_on_host(&common.ranks, common.device, world_size);
        let (ranks, parts) = ranks.map_or((1, 1), |ranks| (ranks, parts));
        if let Some((option, got, help)) = self.too_large(ranks, parts) {
            return refuse(option, got, help);
        }
        if common.data.is_some() {
            return Ok(());
        }
        check_length(self.length, self.max_len).or_else(|help| refuse("--length", self.length, help))?;
        if self.samples > self.vocab_size {
            let help =
                format!("row i holds token i, and there are {} tokens (--vocab-size)", self.vocab_size);
            return refuse("--samples", self.samples, help);
        }
        check_room(self.samples, self.length, common, world_size)
    }

    /// Returns the option to blame, its value and the message if the model does not fit in memory.
    fn too_large(&self, ranks: usize, parts: usize) -> Option<(&'static str, usize, String)> {
        let sizes = [
            ("--d-model", self.d_model),
            ("--d-ff", self.d_ff),
            ("--vocab-size", self.vocab_size),
            ("--num-layers", self.num_layers),
        ];
        let count = |[model, ff, words, blocks]: [f64; 4]| {
            let block = 4.0 * model * (model + 1.0) + 4.0 * model + ff * (model + 1.0) + model * (ff + 1.0);
            words * model + blocks * block + words * (model + 1.0)
        };
        let parameters = count(sizes.map(|(_, size)| size as f64));
        // The table of positions is computed, not trained.
        let table = self.max_len as f64 * self.d_model as f64;
        let bytes = 4.0 * (parameters + table) / parts.max(1) as f64;
        if table > parameters {
            let help = memory_check::too_large(table, "numbers of positions", bytes, ranks)?;
            return Some(("--max-len", self.max_len, help));
        }
        let (option, got) = memory_check::option_to_blame(sizes, count);
        memory_check::too_large(parameters, "parameters", bytes, ranks).map(|help| (option, got, help))
    }

    /// Returns the settings that must be unchanged when a run is resumed.
    pub fn settings(&self) -> Vec<(String, String)> {
        settings!(self, samples, length, dropout, vocab_size, d_model, num_heads, d_ff, num_layers, max_len)
    }
}

/// Checks that so many rows fit in the memory of the ranks here.
pub(crate) fn check_room(
    rows: usize,
    length: usize,
    common: &CommonOptions,
    world_size: usize,
) -> Result<()> {
    let bytes = length.saturating_mul(size_of::<u32>()).saturating_add(size_of::<Row>());
    memory_check::check_samples("--samples", rows, bytes, common, world_size)
}
