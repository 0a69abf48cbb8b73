//! The options of `ddp-transformer`.

use clap::{Args, ValueEnum};
use training::Visible;

use crate::error::{Error, Result};
use crate::models::transformer::TransformerConfig;
use crate::options::{CommonOptions, count, learning_rate, probability};
use crate::report::total_memory_bytes;
use crate::trainer::CheckpointOptions;

/// Which tokens a token sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mask {
    /// Those after it, and the last one all: what the document does.
    Document,
    /// Itself and those before it: what a model that predicts the next token must keep to.
    Causal,
    /// All.
    None,
}

impl From<Mask> for Visible {
    fn from(mask: Mask) -> Self {
        match mask {
            Mask::Document => Visible::Future,
            Mask::Causal => Visible::Past,
            Mask::None => Visible::All,
        }
    }
}

/// Options of `ddp-transformer`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Trains a Transformer to predict the next token, on --world-size ranks with averaged gradients; rank
0 prints its loss at every step. Each row of the data set is one token, repeated.

--data FILE holds the tensor tokens, i64 of shape (rows, length); --init and --save hold PyTorch's
state_dict: embedding.weight, pos_encoding.pe, layers.0.attention.q_linear.weight and so on.")]
pub struct DdpTransformerOptions {
    #[command(flatten)]
    pub(crate) common: CommonOptions,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointOptions,
    /// Passes over the data
    #[arg(long, value_name = "N", default_value = "200", value_parser = count, allow_negative_numbers = true)]
    pub(crate) epochs: usize,
    /// Rows a step, of each rank
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, allow_negative_numbers = true)]
    pub(crate) batch_size: usize,
    /// Learning rate
    #[arg(long, default_value = "0.01", value_parser = learning_rate, allow_negative_numbers = true)]
    pub(crate) lr: f64,
    /// Which tokens a token sees
    #[arg(long, value_enum, default_value = "document")]
    pub(crate) mask: Mask,
    /// Give each epoch an order of its own; the document gives all the same
    #[arg(long)]
    pub(crate) reshuffle: bool,
    /// Rows in the data set
    #[arg(
        long,
        value_name = "N",
        default_value = "12",
        value_parser = count,
        allow_negative_numbers = true,
        conflicts_with = "data"
    )]
    pub(crate) samples: usize,
    /// Tokens in a row
    #[arg(
        long,
        value_name = "N",
        default_value = "10",
        value_parser = count,
        allow_negative_numbers = true,
        conflicts_with = "data"
    )]
    pub(crate) length: usize,
    /// Probability with which dropout zeroes a number
    #[arg(long, value_name = "P", default_value = "0.1", value_parser = probability, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) dropout: f64,
    /// Tokens that there are
    #[arg(long, value_name = "N", default_value = "100", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) vocab_size: usize,
    /// Numbers that a token becomes
    #[arg(long, value_name = "N", default_value = "12", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) d_model: usize,
    /// Heads of attention
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) num_heads: usize,
    /// Width of the feed-forward layers
    #[arg(long, value_name = "N", default_value = "24", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) d_ff: usize,
    /// Blocks
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) num_layers: usize,
    /// Longest row of tokens that the model can take
    #[arg(long, value_name = "N", default_value = "100", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) max_len: usize,
}

impl DdpTransformerOptions {
    pub(super) fn model(&self) -> TransformerConfig {
        let &Self { vocab_size, d_model, num_heads, d_ff, num_layers, max_len, dropout, .. } = self;
        TransformerConfig {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers,
            max_len,
            dropout,
            visible: self.mask.into(),
        }
    }

    /// Refuses sizes that do not go together.
    pub(super) fn check_sizes(&self) -> Result<()> {
        let refuse =
            |option, got: usize, help: String| Err(Error::Option { option, got: got.to_string(), help });
        let &Self { d_model, num_heads, .. } = self;
        if !d_model.is_multiple_of(num_heads) {
            let help = format!("it is split over {num_heads} heads (--num-heads): give a multiple of that");
            return refuse("--d-model", d_model, help);
        }
        if !d_model.is_multiple_of(2) {
            let help = "positions are encoded in pairs of sine and cosine: give an even number";
            return refuse("--d-model", d_model, help.into());
        }
        if let Some(help) = total_memory_bytes().and_then(|there_is| self.too_large_for(there_is)) {
            return refuse("--num-layers", self.num_layers, help);
        }
        if self.common.data.is_some() {
            return Ok(());
        }
        self.check_length(self.length).map_err(|help| Error::Option {
            option: "--length",
            got: self.length.to_string(),
            help,
        })?;
        if self.samples > self.vocab_size {
            let help =
                format!("row i holds token i, and there are {} tokens (--vocab-size)", self.vocab_size);
            return refuse("--samples", self.samples, help);
        }
        Ok(())
    }

    /// What is wrong with the model on a machine of so many bytes: there, nothing would stop it but the system.
    fn too_large_for(&self, bytes: u64) -> Option<String> {
        const GIB: f64 = (1 << 30) as f64;
        // Floats do not overflow, whatever is typed.
        let [model, ff, words, blocks] =
            [self.d_model, self.d_ff, self.vocab_size, self.num_layers].map(|size| size as f64);
        let block = 4.0 * model * (model + 1.0) + 4.0 * model + ff * (model + 1.0) + model * (ff + 1.0);
        let parameters = words * model + blocks * block + words * (model + 1.0);
        let (needed, there_is) = (4.0 * parameters / GIB, bytes as f64 / GIB);
        (needed > there_is).then(|| {
            format!(
                "with the other sizes that makes {parameters:.1e} parameters, {needed:.0} GiB, and this machine has \
                 {there_is:.0} GiB: make the model smaller"
            )
        })
    }

    /// What is wrong with rows of this length.
    pub(super) fn check_length(&self, length: usize) -> std::result::Result<(), String> {
        match length {
            0 | 1 => Err("the next token is predicted from those before it: a row needs 2 or more".into()),
            _ if length - 1 > self.max_len => {
                let most = self.max_len.saturating_add(1);
                Err(format!("the model takes rows of up to {most} tokens with --max-len {}", self.max_len))
            }
            _ => Ok(()),
        }
    }

    /// What a checkpoint must agree in.
    pub(super) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("--lr", self.lr.to_string()),
            ("--batch-size", self.batch_size.to_string()),
            ("--mask", format!("{:?}", self.mask).to_lowercase()),
            ("--reshuffle", self.reshuffle.to_string()),
            ("--samples", self.samples.to_string()),
            ("--length", self.length.to_string()),
            ("--dropout", self.dropout.to_string()),
            ("--vocab-size", self.vocab_size.to_string()),
            ("--d-model", self.d_model.to_string()),
            ("--num-heads", self.num_heads.to_string()),
            ("--d-ff", self.d_ff.to_string()),
            ("--num-layers", self.num_layers.to_string()),
            ("--max-len", self.max_len.to_string()),
        ]
    }
}
