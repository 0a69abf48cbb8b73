//! The Transformer as a list of modules, to be cut into pipeline stages.

use ops::linear;
use pipeline::Modules;
use sampler::SharedGenerator;

use crate::documents::shared::transformer::{
    PositionalEncoding, TokenEmbedding, TransformerBlock, TransformerConfig,
};

/// Returns the model as modules: `embedding`, `pos_encoding`, `layers.0` and so on, `out_linear`. Dropout draws
/// from `random`.
///
/// ```
/// use bin::documents::pipeline_tutorial::transformer_modules;
/// use bin::documents::shared::transformer::TransformerConfig;
/// use sampler::{Generator, SharedGenerator};
///
/// let config = TransformerConfig { vocab_size: 100, num_layers: 2, ..Default::default() };
/// let modules = transformer_modules(&config, &SharedGenerator::from(Generator::new(1)));
/// assert_eq!(modules.names(), ["embedding", "pos_encoding", "layers.0", "layers.1", "out_linear"]);
/// ```
pub fn transformer_modules(config: &TransformerConfig, random: &SharedGenerator) -> Modules {
    let &TransformerConfig { vocab_size, d_model, num_layers, max_len, .. } = config;
    let first = Modules::new()
        .buffers(&["pe"])
        .module("embedding", move |vb| TokenEmbedding::new(vocab_size, d_model, vb))
        .module("pos_encoding", move |vb| PositionalEncoding::new(max_len, d_model, vb));
    let blocks = (0..num_layers).fold(first, |modules, layer| {
        let (config, random) = (config.clone(), random.clone());
        let block = move |vb| TransformerBlock::new(vb, &config, &random);
        modules.module(&format!("layers.{layer}"), block)
    });
    blocks.module("out_linear", move |vb| linear(d_model, vocab_size, vb))
}
