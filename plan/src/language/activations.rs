//! What forward keeps of a token for backward, by unit: the result of each operation, and what operations keep to themselves.

use models::{Family, Lora, ModelConfig};
use training::build::Division;

use super::outline::Unit;
use super::{Numbers, Subject};

/// A row's class, as losses keep it.
const CLASS_BYTES: usize = size_of::<Option<usize>>();
/// A token's place in a table of which a rank has a part.
const PLACE_BYTES: usize = size_of::<u32>();

/// Bytes that a model keeps of each token.
#[derive(Debug, Clone, Copy)]
pub(super) struct PerToken<'a> {
    config: &'a ModelConfig,
    numbers: Numbers,
    tp: usize,
    adapter_dropout: f64,
}

impl<'a> PerToken<'a> {
    pub(super) fn new(subject: &'a Subject, numbers: Numbers, tp: usize) -> Self {
        let adapter_dropout = subject.lora.as_ref().map_or(0.0, |lora| lora.config().dropout);
        Self { config: &subject.config, numbers, tp, adapter_dropout }
    }

    /// What a unit gives to the next one.
    pub(super) fn output(self) -> usize {
        self.config.hidden_size * self.numbers.element
    }

    /// Numbers that an operation computes wide from `inputs` numbers, and gives as they came.
    fn wide(self, inputs: usize, outputs: usize) -> usize {
        let Numbers { element, working } = self.numbers;
        if element == working { outputs * element } else { (inputs + outputs) * working + outputs * element }
    }

    /// The embedding.
    pub(super) fn embedding(self) -> usize {
        // Learnt positions, and their sum with the tokens.
        let positions = if self.config.family == Family::Gpt2 { 2 * self.output() } else { 0 };
        let places = if self.tp > 1 { PLACE_BYTES + self.numbers.element } else { 0 };
        self.output() + positions + places + self.dropped(self.config.dropout.embedding, self.output())
    }

    /// What dropout gives of so many bytes.
    fn dropped(self, p: f64, bytes: usize) -> usize {
        if p > 0.0 { bytes } else { 0 }
    }

    /// A block.
    pub(super) fn block(self, unit: &Unit) -> usize {
        let &ModelConfig { hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, .. } =
            self.config;
        let heads = num_heads / self.tp;
        let (queries, keys) = (heads * head_dim, num_kv_heads / self.tp * head_dim);
        let (qkv, hidden) = (queries + 2 * keys, intermediate_size / self.tp);
        let Numbers { element, working } = self.numbers;
        let layers: usize = unit.layers.iter().map(|layer| self.layer(layer)).sum();
        let norms = 2 * self.wide(hidden_size, hidden_size);
        let by_head = match self.config.qk_norm {
            true => self.wide(queries, queries) + self.wide(keys, keys),
            false => 0,
        };
        let rotated = match self.config.rotary {
            Some(_) => self.wide(queries, queries) + self.wide(keys, keys),
            None => 0,
        };
        // Queries, keys and values that lie side by side are copied apart.
        let apart = if self.config.family == Family::Gpt2 && element == working { qkv * element } else { 0 };
        let attention = self.wide(qkv, queries) + heads * working + apart;
        let inputs = if self.config.family == Family::Gpt2 { hidden } else { 2 * hidden };
        let activation = self.wide(inputs, hidden);
        let sums = 2 * (self.output() + self.dropped(self.config.dropout.residual, self.output()));
        layers + norms + by_head + rotated + attention + activation + sums
    }

    /// A block of which the cheap rest is computed again: what came in, and the results of products and attention.
    pub(super) fn products(self, unit: &Unit) -> usize {
        let heads = self.config.num_heads / self.tp;
        let Numbers { element, working } = self.numbers;
        let layers: usize = unit.layers.iter().map(|layer| layer.outputs * element).sum();
        self.output() + layers + heads * (self.config.head_dim * element + working)
    }

    fn layer(self, layer: &super::outline::Layer) -> usize {
        let given = layer.outputs * self.numbers.element;
        if Lora::is_adapter(&format!("{}.weight", layer.name)) {
            // What goes into the first one; what is scaled, and what is added to the layer's own.
            let is_first = layer.name.ends_with("lora_A");
            let into = if is_first { layer.inputs * self.numbers.element } else { 0 };
            return 2 * given + self.dropped(self.adapter_dropout, into);
        }
        let is_narrow = self.numbers.element != self.numbers.working;
        let is_whole = self.tp == 1 || layer.division == Division::Whole;
        // The bias is added in an operation of its own.
        if is_narrow && is_whole && layer.bias { 2 * given } else { given }
    }

    /// What backward of a block needs for a moment: gradients of what lies between its operations, as many as are alive at once.
    pub(super) fn backward(self) -> usize {
        let &ModelConfig { hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, .. } =
            self.config;
        let qkv = (num_heads + 2 * num_kv_heads) * head_dim / self.tp;
        let hidden = intermediate_size / self.tp;
        let most = match self.config.family {
            // The parts of what lies side by side are made as wide as the whole, and added.
            Family::Gpt2 => (4 * qkv).max(3 * hidden),
            _ => (2 * qkv + hidden_size).max(4 * hidden),
        };
        (most + hidden_size) * self.numbers.working
    }

    /// The head and a loss that does not make all logits at once, or all the same where the vocabulary is divided.
    pub(super) fn loss(self) -> usize {
        let Numbers { element, working } = self.numbers;
        let hidden = self.config.hidden_size;
        let norm = self.wide(hidden, hidden);
        if self.tp == 1 {
            // The gradient of what comes in.
            let wide = if element == working { 0 } else { hidden * working };
            return norm + wide + hidden * working + CLASS_BYTES;
        }
        let own = self.config.vocab_size.div_ceil(self.tp);
        let wide = if element == working { 0 } else { own * working };
        norm + own * element + wide + own * working + working + CLASS_BYTES
    }

    /// The head and the loss of a pipeline's last stage: all logits, and as many probabilities.
    pub(super) fn logits_and_loss(self) -> usize {
        self.logits() + self.loss_of_logits()
    }

    /// The head of a stage.
    pub(super) fn logits(self) -> usize {
        let (hidden, all) = (self.config.hidden_size, self.config.vocab_size);
        let own = if self.tp > 1 { all.div_ceil(self.tp) } else { 0 };
        self.wide(hidden, hidden) + (own + all) * self.numbers.element
    }

    fn loss_of_logits(self) -> usize {
        let Numbers { element, working } = self.numbers;
        let all = self.config.vocab_size;
        let wide = if element == working { 0 } else { all * working };
        wide + all * working + CLASS_BYTES
    }
}
