//! Operations of a training step, as counted for model FLOP/s and model FLOPs utilization (MFU).

use girandole::Layout;

use super::outline::Layer;
use super::{Subject, Unit};
use crate::Result;

impl Subject {
    /// Returns the operations of training on a row of `length` tokens, forward and backward, of documents of `document_length`
    /// tokens that do not see each other; that is `length` if they do. A multiplication and an
    /// addition count as one operation each.
    ///
    /// For each token: 6 for each parameter of a matrix product (2 in forward, 2 for the gradient of its input, 2 for
    /// its own gradient), or 4 if the parameter is frozen; this includes the head, but not the embedding, and of experts
    /// only those that a token uses. Attention
    /// adds `6 * layers * heads * (head_dim + value_dim) * document_length`, `value_dim` the width of a head of values, with the sliding window in its place if that is shorter.
    /// Recomputation in backward does not count; the causal mask does not reduce the count; norms, softmax, routers and
    /// the optimizer are not counted.
    ///
    /// # Errors
    /// A model that cannot be built.
    ///
    /// # Source
    /// Chowdhery et al., "PaLM" (2022), appendix B.
    pub fn training_flops(&self, length: usize, document_length: f64) -> Result<f64> {
        let units = self.units(&Layout::default())?;
        let all = (0..units.len()).flat_map(|place| self.flops(&units, place, document_length));
        Ok(all.sum::<f64>() * length as f64)
    }

    /// Returns the operations of one of the whole model's units per token, forward and backward.
    pub(super) fn flops(&self, units: &[Unit], place: usize, attended: f64) -> [f64; 2] {
        let (config, unit) = (&self.config, &units[place]);
        let mut sum = self.layer_flops(unit, |_| true);
        if place + 1 == units.len() {
            // A head for labels is always trained.
            let is_trained = config.labels.is_some()
                || self.lora.as_ref().is_none_or(|lora| lora.trains("lm_head.weight"));
            let [forward, backward] = product((config.outputs() * config.hidden_size) as f64, is_trained);
            sum = [sum[0] + forward, sum[1] + backward];
        } else if place > 0 {
            let [forward, backward] = self.attention_flops(place, attended);
            sum = [sum[0] + forward, sum[1] + backward];
        }
        sum
    }

    /// Returns the operations of some of a unit's linear layers per token, forward and backward.
    pub(super) fn layer_flops(&self, unit: &Unit, wanted: impl Fn(&Layer) -> bool) -> [f64; 2] {
        let of_layer = |layer: &Layer| {
            let weight = format!("{}.weight", layer.name);
            let of = unit.tensors.iter().find(|tensor| tensor.name == weight);
            let numbers = (layer.inputs * layer.outputs) as f64 * layer.share(&self.config);
            product(numbers, of.is_none_or(|weight| weight.is_trained))
        };
        let all = unit.layers.iter().filter(|layer| wanted(layer)).map(of_layer);
        all.fold([0.0; 2], |sum, of| [sum[0] + of[0], sum[1] + of[1]])
    }

    /// Returns the operations of the attention of a block per token, forward and backward.
    pub(super) fn attention_flops(&self, block: usize, attended: f64) -> [f64; 2] {
        let config = &self.config;
        let window = config.windows.get(block - 1).copied().flatten();
        let attended = window.map_or(attended, |window| attended.min(window as f64));
        let numbers = (config.num_heads * (config.head_dim + config.value_dim())) as f64 * attended;
        [2.0 * numbers, 4.0 * numbers]
    }
}

/// Returns the operations of a product with a weight of so many numbers, forward and backward.
fn product(numbers: f64, is_trained: bool) -> [f64; 2] {
    [2.0 * numbers, if is_trained { 4.0 } else { 2.0 } * numbers]
}

#[cfg(test)]
mod tests {
    use models::{Lora, LoraConfig, ModelConfig};

    use super::*;

    fn config(tied: bool) -> ModelConfig {
        let json = format!(
            r#"{{"model_type": "llama", "vocab_size": 100, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 64,
                 "rms_norm_eps": 1e-5, "initializer_range": 0.1, "tie_word_embeddings": {tied}, "rope_theta": 10000.0}}"#
        );
        ModelConfig::from_json(&json).unwrap()
    }

    /// Parameters of a block: queries and output, keys and values, gate with up and down.
    const BLOCK: f64 = (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) as f64;
    const ATTENTION: f64 = (12 * 3 * 16 * 8) as f64;

    #[test]
    fn products_and_attention_are_counted() {
        let expected = 8.0 * (6.0 * (3.0 * BLOCK + 1600.0) + ATTENTION);
        for tied in [false, true] {
            let subject = Subject::new(config(tied), None);
            assert_eq!(subject.training_flops(8, 8.0).unwrap(), expected, "{tied}");
            let of_documents = expected - 8.0 * ATTENTION * 0.75;
            assert_eq!(subject.training_flops(8, 2.0).unwrap(), of_documents, "{tied}");
        }
    }

    #[test]
    fn what_is_frozen_has_no_gradient() {
        let targets = vec!["q_proj".to_string()];
        let lora =
            Lora::new(&LoraConfig { rank: 2, targets, ..LoraConfig::default() }, &config(true)).unwrap();
        let adapters = 3.0 * (2 * 16 + 16 * 2) as f64;
        let expected = 8.0 * (4.0 * (3.0 * BLOCK + 1600.0) + 6.0 * adapters + ATTENTION);
        assert_eq!(Subject::new(config(true), Some(lora)).training_flops(8, 8.0).unwrap(), expected);
    }
}
