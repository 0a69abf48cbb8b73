//! What a model computes and holds, for the time forecast.

use serde::{Deserialize, Serialize};

const ELEMENT: usize = size_of::<f32>();
/// Seconds of the optimizer per parameter: Adam reads and writes 28 bytes, at about 3 TB/s.
const ADAM_S: f64 = 28.0 / 3e12;

/// Part of a model that is gathered, or assigned to a stage, as a whole. Times and bytes are those of one micro-batch
/// of one rank, without tensor parallelism.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Number of parameters.
    pub parameters: usize,
    /// Seconds of forward.
    pub forward_s: f64,
    /// Seconds of backward.
    pub backward_s: f64,
    /// Bytes of its output.
    pub output_bytes: usize,
    /// Bytes of each all-reduce in forward, with tensor parallelism.
    pub forward_reductions: Vec<usize>,
    /// Bytes of each all-reduce in backward, with tensor parallelism.
    pub backward_reductions: Vec<usize>,
}

/// What a model computes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    /// Its layers, in order.
    pub layers: Vec<Layer>,
    /// Seconds of the optimizer per parameter.
    pub optimizer_s: f64,
    /// Bytes of a parameter, and of its gradient.
    pub element_bytes: usize,
    /// Bytes of a parameter when gathered, and of its gradient when reduced.
    pub gathered_bytes: usize,
}

/// No layers, in f32.
impl Default for Work {
    fn default() -> Self {
        Self { layers: Vec::new(), optimizer_s: 0.0, element_bytes: ELEMENT, gathered_bytes: ELEMENT }
    }
}

/// Sizes of a Transformer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transformer {
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Number of features of a token.
    pub d_model: usize,
    /// Width of the feed-forward layers.
    pub d_ff: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Number of tokens in a row.
    pub length: usize,
}

impl Transformer {
    /// Returns the number of parameters of each part, and the operations of its forward pass for a row: embedding,
    /// blocks, last layer.
    pub fn parts(&self) -> Vec<(usize, f64)> {
        let &Self { vocab_size, d_model, d_ff, num_layers, length } = self;
        let rows = length as f64;
        let block = 4 * d_model * (d_model + 1) + 2 * d_model * d_ff + d_ff + 5 * d_model;
        let products = (4 * d_model * d_model + 2 * d_model * d_ff) as f64;
        let block_flops = 2.0 * rows * products + 4.0 * rows * rows * d_model as f64;
        let mut parts = vec![(vocab_size * d_model, 0.0)];
        parts.extend(vec![(block, block_flops); num_layers]);
        parts.push((vocab_size * (d_model + 1), 2.0 * rows * (vocab_size * d_model) as f64));
        parts
    }
}

impl Work {
    /// Transformer with `rows` of tokens in a micro-batch, on ranks that compute `flops` operations per second.
    pub fn transformer(model: &Transformer, rows: usize, flops: f64) -> Self {
        let forward: f64 = model.parts().iter().map(|part| part.1).sum::<f64>() * rows as f64 / flops;
        let parameters: usize = model.parts().iter().map(|part| part.0).sum();
        Self::measured(model, rows, [forward, 2.0 * forward, ADAM_S * parameters as f64])
    }

    /// Transformer whose forward, backward and optimizer take these seconds on one rank, with `rows` of tokens.
    pub fn measured(model: &Transformer, rows: usize, [forward, backward, optimizer]: [f64; 3]) -> Self {
        let parts = model.parts();
        let all: f64 = parts.iter().map(|part| part.1).sum();
        let parameters: usize = parts.iter().map(|part| part.0).sum();
        let output_bytes = rows * model.length * model.d_model * ELEMENT;
        let last = parts.len() - 1;
        let layer = |(place, (parameters, flops)): (usize, (usize, f64))| {
            let share = if all > 0.0 { flops / all } else { 0.0 };
            // A block has one after attention and one after feed-forward; the embedding and the last layer are given
            // one each.
            let reductions = vec![output_bytes; if place == 0 || place == last { 1 } else { 2 }];
            Layer {
                parameters,
                forward_s: share * forward,
                backward_s: share * backward,
                output_bytes,
                forward_reductions: reductions.clone(),
                backward_reductions: reductions,
            }
        };
        let layers = parts.into_iter().enumerate().map(layer).collect();
        Self { layers, optimizer_s: optimizer / parameters.max(1) as f64, ..Self::default() }
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|layer| layer.parameters).sum()
    }

    /// Returns the bytes of parameters, gradients and Adam's two numbers, all in f32, for so many parameters.
    pub(super) fn bytes(parameters: f64) -> f64 {
        ELEMENT as f64 * 4.0 * parameters
    }
}
