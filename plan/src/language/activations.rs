//! Activations kept for backward per token, by unit: outputs of operations, and what operations keep internally.

use models::{ExpertsConfig, Family, LatentConfig, Lora, ModelConfig};

use super::outline::Unit;
use super::{Numbers, Subject};

/// Bytes of a row's class, as losses keep it.
const CLASS_BYTES: usize = size_of::<Option<usize>>();
/// Bytes of a token's index in a divided embedding table.
const PLACE_BYTES: usize = size_of::<u32>();

/// Calculates the bytes that a model keeps of each token.
#[derive(Debug, Clone, Copy)]
pub(super) struct PerToken<'a> {
    config: &'a ModelConfig,
    numbers: Numbers,
    tp: usize,
    ep: usize,
    adapter_dropout: f64,
    /// Whether adapters have magnitudes (DoRA).
    has_magnitudes: bool,
}

impl<'a> PerToken<'a> {
    pub(super) fn new(subject: &'a Subject, numbers: Numbers, (tp, ep): (usize, usize)) -> Self {
        let adapter_dropout = subject.lora.as_ref().map_or(0.0, |lora| lora.config().dropout);
        let has_magnitudes = subject.lora.as_ref().is_some_and(|lora| lora.config().dora);
        Self { config: &subject.config, numbers, tp, ep, adapter_dropout, has_magnitudes }
    }

    /// Returns the bytes of a unit's output.
    pub(super) fn output(self) -> usize {
        self.config.hidden_size * self.numbers.element
    }

    /// Returns the numbers of a token's keys and values in a block.
    pub(super) fn keys_and_values(self) -> usize {
        2 * self.config.num_kv_heads / self.tp * self.head_width()
    }

    /// Returns the width of a head in attention: where those of queries and of values differ, zeros fill the narrower ones.
    fn head_width(self) -> usize {
        self.config.head_dim.max(self.config.value_dim())
    }

    /// Returns the bytes kept by an operation with `outputs` results: if the dtype is 16-bit, also its inputs and
    /// results in 32 bits.
    fn wide(self, inputs: usize, outputs: usize) -> usize {
        let Numbers { element, working } = self.numbers;
        if element == working { outputs * element } else { (inputs + outputs) * working + outputs * element }
    }

    /// Returns the bytes kept by the embedding.
    pub(super) fn embedding(self) -> usize {
        // Learned positions, and their sum with the token embedding.
        let positions = if self.config.family == Family::Gpt2 { 2 * self.output() } else { 0 };
        let places = if self.tp > 1 { PLACE_BYTES + self.numbers.element } else { 0 };
        self.output() + positions + places + self.dropped(self.config.dropout.embedding, self.output())
    }

    /// Returns the bytes kept by dropout with an output of so many bytes.
    fn dropped(self, p: f64, bytes: usize) -> usize {
        if p > 0.0 { bytes } else { 0 }
    }

    /// Returns the bytes kept by a block.
    pub(super) fn block(self, unit: &Unit) -> usize {
        let hidden_size = self.config.hidden_size;
        let layers = unit.layers.iter().filter(|layer| !layer.is_expert());
        let layers: usize = layers.map(|layer| self.layer(layer)).sum();
        let norms = 2 * self.wide(hidden_size, hidden_size);
        let projected = match &self.config.latent {
            Some(latent) => self.latent(latent),
            None => self.projected(),
        };
        let is_sparse = unit.layers.iter().any(super::outline::Layer::is_expert);
        let feed_forward = match self.config.experts.as_ref().filter(|_| is_sparse) {
            Some(experts) => self.experts(experts),
            None => self.activation(self.config.intermediate_size),
        };
        let sums = 2 * (self.output() + self.dropped(self.config.dropout.residual, self.output()));
        layers + norms + projected + self.attention() + feed_forward + sums
    }

    /// Returns the bytes kept by attention.
    fn attention(self) -> usize {
        let (heads, kv_heads) = (self.config.num_heads / self.tp, self.config.num_kv_heads / self.tp);
        let width = self.head_width();
        self.wide((heads + 2 * kv_heads) * width, heads * width) + heads * self.numbers.working
    }

    /// Returns the bytes kept between the projections and attention.
    fn projected(self) -> usize {
        let &ModelConfig { num_heads, num_kv_heads, head_dim, .. } = self.config;
        let [queries, keys] = [num_heads, num_kv_heads].map(|heads| heads / self.tp * head_dim);
        let both = self.wide(queries, queries) + self.wide(keys, keys);
        let by_head = if self.config.qk_norm { both } else { 0 };
        let rotated = if self.config.rotary.is_some() { both } else { 0 };
        // Fused queries, keys and values are copied to separate tensors.
        let is_fused = self.config.family == Family::Gpt2;
        let apart = if is_fused { (queries + 2 * keys) * self.numbers.element } else { 0 };
        by_head + rotated + apart
    }

    /// Returns the bytes kept between the projections of latent attention and attention.
    fn latent(self, latent: &LatentConfig) -> usize {
        let &LatentConfig { query_rank, key_rank, rotary_dim, value_dim, .. } = latent;
        let (heads, width, element) =
            (self.config.num_heads / self.tp, self.head_width(), self.numbers.element);
        let norms = self.wide(key_rank, key_rank) + query_rank.map_or(0, |rank| self.wide(rank, rank));
        // The features that are normed, and the part of the key that all heads have in common; the turned part of queries.
        let apart = (key_rank + rotary_dim + heads * rotary_dim) * element;
        let rotated = self.wide(heads * rotary_dim, heads * rotary_dim) + self.wide(rotary_dim, rotary_dim);
        // Queries, keys and values, and the result without zeros.
        let joined = 3 * heads * width * element;
        let without_zeros = if width == value_dim { 0 } else { heads * value_dim * element };
        norms + apart + rotated + joined + without_zeros
    }

    /// Returns the bytes kept by the activation of a dense feed-forward layer.
    fn activation(self, width: usize) -> usize {
        let hidden = width / self.tp;
        match self.config.family {
            Family::Gpt2 => self.wide(hidden, hidden),
            // Computed in 32 bits of 16, and of these again in backward.
            _ => hidden * self.numbers.element,
        }
    }

    /// Returns the bytes kept by experts beside the layers that all tokens use.
    fn experts(self, experts: &ExpertsConfig) -> usize {
        let Numbers { element, working } = self.numbers;
        let hidden = self.config.hidden_size;
        // The rows gathered, and the results of the three products.
        let of_each = (2 * hidden + 2 * experts.width / self.tp) * element;
        // Scores, their shares, the weights of the chosen ones, and the sum; a shared expert, times its gate if it has one, and their sum.
        let scores = match experts.sigmoid {
            // Of factors in 32 bits.
            Some(_) => self.wide(hidden, 0) + 2 * experts.count * working,
            None => self.wide(experts.count, 0) + experts.count * (element + working),
        };
        let gated = match self.config.family {
            Family::DeepseekV3 => 0,
            _ => self.wide(hidden, hidden) + self.wide(1, 0) + working,
        };
        let shared =
            experts.shared_width.map_or(0, |width| self.activation(width) + gated + hidden * element);
        experts.per_token * (of_each + working) + self.moved(experts) + scores + hidden * element + shared
    }

    /// Returns the bytes of rows that have come from other ranks, and of results that have come back.
    fn moved(self, experts: &ExpertsConfig) -> usize {
        if self.ep > 1 { 2 * experts.per_token * self.output() } else { 0 }
    }

    /// Returns the bytes kept by a block with selective recomputation: its input, the results of matrix products and attention, and
    /// what comes from other ranks.
    pub(super) fn products(self, unit: &Unit) -> usize {
        let heads = self.config.num_heads / self.tp;
        let Numbers { element, working } = self.numbers;
        // A rank's experts have the tokens of all ranks that divide them.
        let ranks = |layer: &super::outline::Layer| if layer.is_expert() { self.ep as f64 } else { 1.0 };
        let kept = |layer: &super::outline::Layer| {
            (layer.outputs * element) as f64 * layer.share(self.config) * ranks(layer)
        };
        // What adapters of experts add is in the results of their layers.
        let is_product = |layer: &&super::outline::Layer| !(layer.is_expert() && is_adapter(layer));
        let layers = unit.layers.iter().filter(is_product).map(kept).sum::<f64>().round() as usize;
        // The scores of a router are a product, too; rows are not sent again.
        let is_sparse = unit.layers.iter().any(super::outline::Layer::is_expert);
        let experts = self.config.experts.as_ref().filter(|_| is_sparse);
        let of_score = |experts: &ExpertsConfig| if experts.sigmoid.is_some() { working } else { element };
        let of_experts = |experts: &ExpertsConfig| experts.count * of_score(experts) + self.moved(experts);
        let layers = layers + experts.map_or(0, of_experts);
        self.output() + layers + heads * (self.head_width() * element + working)
    }

    /// Returns the bytes of a block's forward pass without backward, where most of them are alive: at most those of its attention, or
    /// of its feed-forward layer, with the values that are added to them.
    pub(super) fn block_alone(self, unit: &Unit) -> usize {
        let &ModelConfig { num_heads, num_kv_heads, head_dim, intermediate_size, .. } = self.config;
        let (queries, keys) = (num_heads / self.tp * head_dim, num_kv_heads / self.tp * head_dim);
        let qkv = queries + 2 * keys;
        let (element, output) = (self.numbers.element, self.output());
        let fused = if self.config.family == Family::Gpt2 { qkv * element } else { 0 };
        // While attention or rotation computes, or the projection of its output.
        let rotation = self.wide(queries, queries) + keys * element;
        let attention = self.wide(qkv, queries) + num_heads / self.tp * self.numbers.working;
        let attention =
            2 * output + qkv * element + fused.max(rotation).max(attention).max(queries * element + output);
        let is_sparse = unit.layers.iter().any(super::outline::Layer::is_expert);
        let hidden = intermediate_size / self.tp;
        let feed_forward = match self.config.experts.as_ref().filter(|_| is_sparse) {
            Some(experts) => self.experts(experts),
            None => {
                let inputs = if self.config.family == Family::Gpt2 { hidden } else { 2 * hidden };
                inputs * element + self.wide(inputs, hidden).max(hidden * element + output)
            }
        };
        let adapters = unit.layers.iter().filter(|layer| is_adapter(layer) && !layer.is_expert());
        let adapter = adapters.map(|layer| self.layer(layer)).max().unwrap_or_default();
        adapter + attention.max(4 * output + feed_forward)
    }

    /// Returns the bytes of the last unit's forward pass without backward, with its input.
    pub(super) fn loss_alone(self) -> usize {
        let Numbers { element, working } = self.numbers;
        let of_backward = match (self.tp, &self.config.labels) {
            (_, Some(_)) => 0,
            // The gradient of the loss's input.
            (1, None) => self.config.hidden_size * working,
            // Logits of 16 bits, once they are converted.
            (tp, None) if element != working => self.config.outputs().div_ceil(tp) * element,
            _ => 0,
        };
        self.output() + self.loss() - of_backward
    }

    fn layer(self, layer: &super::outline::Layer) -> usize {
        let given = layer.outputs * self.numbers.element;
        if is_adapter(layer) {
            // Kept besides a matrix's output: dropout of the first matrix's input, the first matrix's scaled output,
            // and the sum of the second matrix's output with that of the layer; with DoRA, that sum times the magnitudes, too.
            let is_first = layer.name.ends_with("lora_A");
            let into = if is_first { layer.inputs * self.numbers.element } else { 0 };
            let scaled = if self.has_magnitudes && !is_first { given } else { 0 };
            return 2 * given + scaled + self.dropped(self.adapter_dropout, into);
        }
        given
    }

    /// Returns the temporary bytes of a block's backward: the gradients that are alive at the same time.
    pub(super) fn backward(self) -> usize {
        let &ModelConfig { hidden_size, intermediate_size, num_heads, num_kv_heads, .. } = self.config;
        let qkv = (num_heads + 2 * num_kv_heads) * self.head_width() / self.tp;
        let of_experts =
            |experts: &ExpertsConfig| experts.per_token * (experts.width / self.tp + hidden_size / 2);
        let sparse = self.config.experts.as_ref().map_or(0, of_experts);
        let hidden = (intermediate_size / self.tp).max(sparse);
        let most = match self.config.family {
            // Gradients of the separate parts are padded to the fused width, and added.
            Family::Gpt2 => (4 * qkv).max(3 * hidden),
            _ => (2 * qkv + hidden_size).max(4 * hidden),
        };
        (most + hidden_size) * self.numbers.working
    }

    /// Returns the bytes kept by head and loss: without tensor parallelism a loss that never holds all logits, else all
    /// of this rank's logits.
    pub(super) fn loss(self) -> usize {
        let Numbers { element, working } = self.numbers;
        let hidden = self.config.hidden_size;
        let norm = self.wide(hidden, hidden);
        if let Some(labels) = &self.config.labels {
            // Of one document in each row of tokens at most: its scores and their loss.
            return norm + labels.names.len() * (element + working) + CLASS_BYTES;
        }
        if self.tp == 1 {
            // Copy of the norm's output in 32 bits; below, also the gradient of the loss's input, which the loss
            // computes in forward.
            let wide = if element == working { 0 } else { hidden * working };
            return norm + wide + hidden * working + CLASS_BYTES;
        }
        let own = self.config.outputs().div_ceil(self.tp);
        let wide = if element == working { 0 } else { own * working };
        norm + own * element + wide + own * working + working + CLASS_BYTES
    }
}

/// Whether a layer is a matrix of an adapter.
fn is_adapter(layer: &super::outline::Layer) -> bool {
    Lora::is_adapter(&format!("{}.weight", layer.name))
}
