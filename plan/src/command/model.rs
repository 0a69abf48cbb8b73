//! The model that the options of `plan` describe: a command's, with some of its sizes changed.

use clap::ValueEnum;
use comm::{Error, Result};

use super::{LARGEST, ModelName, PlanOptions, refuse};
use crate::extent::SizeBounds;
use crate::{MlpLoss, Model, TransformerSizes};

/// Maximum number of layers, since each is a separate part of the plan's model.
const MOST_LAYERS: usize = 1 << 12;
impl PlanOptions {
    /// Returns the model with its sizes.
    ///
    /// # Errors
    /// Sizes of another kind of model, too large ones, or incompatible ones.
    pub fn model(&self) -> Result<Model> {
        let name = self.model.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
        // Layer sizes, whether there is an activation function between layers, and the loss.
        let (mlp, has_function, loss): (&[u64], bool, MlpLoss) = match self.model {
            ModelName::DdpLinear => (&[1, 1], false, MlpLoss::Squares),
            ModelName::DdpTrainer => (&[20, 1], false, MlpLoss::Squares),
            ModelName::DdpMlp => (&[10, 20, 2], true, MlpLoss::Classes),
            ModelName::FsdpMlp => (&[1024, 4096, 4096, 1024, 10], false, MlpLoss::Classes),
            ModelName::TensorParallelMlp => (&[1024, 4096, 1024], true, MlpLoss::Squares),
            // vocabulary, features, heads, feed-forward width, layers, longest row, row length
            ModelName::DdpTransformer => return self.transformer(&name, [100, 12, 4, 24, 2, 100, 10], false),
            ModelName::TensorParallelTransformer => {
                return self.transformer(&name, [256, 128, 8, 512, 2, 64, 33], true);
            }
        };
        if let Some((option, value)) = self.transformer_options().into_iter().find_map(|(o, v)| Some((o, v?)))
        {
            return refuse(option, value, format!("{name} is made of linear layers: give --sizes"));
        }
        if let Some(dropout) = self.dropout {
            let help = format!("{name} is made of linear layers and has none: leave it out");
            return Err(Error::invalid("--dropout", dropout, help));
        }
        let given: Vec<u64> = self.sizes.iter().map(|size| *size as u64).collect();
        if let [only] = given[..] {
            return refuse("--sizes", only as usize, "a layer has two: give 2 or more".into());
        }
        check_sizes(self.sizes.iter().map(|size| ("--sizes", *size)))?;
        let sizes = if given.is_empty() { mlp } else { &given };
        let widest = sizes.iter().copied().max().unwrap_or(1);
        self.check_extent(SizeBounds::of_layers(sizes), ("--sizes", widest as usize))?;
        Ok(Model::mlp(&name, sizes, has_function, loss))
    }

    fn transformer(&self, name: &str, defaults: [usize; 7], is_modern: bool) -> Result<Model> {
        if let Some(size) = self.sizes.first() {
            return refuse("--sizes", *size, format!("{name} is a transformer: give --d-model and the like"));
        }
        let options = self.transformer_options();
        check_sizes(options.into_iter().filter_map(|(option, size)| Some((option, size?))))?;
        if let Some(layers) = self.num_layers.filter(|layers| *layers > MOST_LAYERS) {
            return refuse("--num-layers", layers, format!("give at most {MOST_LAYERS}"));
        }
        let mut sizes = defaults;
        for (size, (_, given)) in sizes.iter_mut().zip(options) {
            *size = given.unwrap_or(*size);
        }
        if self.d_model.is_some() && self.d_ff.is_none() {
            sizes[3] = 4 * sizes[1];
        }
        if self.length.is_some() && self.max_len.is_none() {
            sizes[5] = sizes[5].max(sizes[6].saturating_sub(1));
        }
        let [_, d_model, num_heads, _, _, max_len, length] = sizes;
        check_heads(d_model, num_heads).or_else(|help| refuse("--d-model", d_model, help))?;
        if length < 2 || length - 1 > max_len {
            let most = max_len + 1;
            return refuse("--length", length, format!("give 2 to {most} tokens with --max-len {max_len}"));
        }
        let [vocab_size, d_model, num_heads, d_ff, num_layers, max_len, length] =
            sizes.map(|size| size as u64);
        let length = length - 1;
        let has_dropout = self.dropout.map_or(!is_modern, |dropout| dropout > 0.0);
        let sizes = TransformerSizes {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers,
            max_len,
            length,
            is_modern,
            has_dropout,
        };
        self.check_extent(SizeBounds::of_transformer(&sizes), ("--d-model", d_model as usize))?;
        Ok(Model::transformer(name, &sizes))
    }

    /// Rejects a model or batch too large for any machine; `option` is the one to blame for the model's size.
    fn check_extent(&self, extent: SizeBounds, (option, got): (&'static str, usize)) -> Result<()> {
        extent.check(self.batch_size()).or_else(|error| match error {
            crate::Error::TooManySamples { .. } => {
                refuse("--batch-size", self.batch_size(), error.to_string())
            }
            error => refuse(option, got, error.to_string()),
        })
    }

    fn transformer_options(&self) -> [(&'static str, Option<usize>); 7] {
        [
            ("--vocab-size", self.vocab_size),
            ("--d-model", self.d_model),
            ("--num-heads", self.num_heads),
            ("--d-ff", self.d_ff),
            ("--num-layers", self.num_layers),
            ("--max-len", self.max_len),
            ("--length", self.length),
        ]
    }
}

/// Checks that the attention heads divide the features of a token.
///
/// # Errors
/// What to give.
pub fn check_heads(d_model: usize, num_heads: usize) -> std::result::Result<(), String> {
    if d_model.is_multiple_of(num_heads) {
        return Ok(());
    }
    Err(format!("it is split over {num_heads} heads (--num-heads): give a multiple of that"))
}

fn check_sizes(mut sizes: impl Iterator<Item = (&'static str, usize)>) -> Result<()> {
    match sizes.find(|(_, size)| *size > LARGEST) {
        Some((option, size)) => refuse(option, size, format!("give at most {LARGEST}")),
        None => Ok(()),
    }
}
