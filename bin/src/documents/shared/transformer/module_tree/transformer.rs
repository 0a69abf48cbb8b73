//! The Transformer's module tree as PyTorch prints it.

use ops::AttentionMask;

use super::ModuleTree;
use crate::documents::shared::python::Float;
use crate::documents::shared::transformer::{LAYER_NORM_EPS, TransformerConfig};

/// The model that the tutorials train.
const TRAINED: TransformerConfig = TransformerConfig {
    vocab_size: 100,
    d_model: 12,
    num_heads: 4,
    d_ff: 24,
    num_layers: 2,
    max_len: 100,
    dropout: 0.1,
    mask: AttentionMask::Full,
};
/// The model whose tree the tutorials print, which differs from the one they train.
const PRINTED: TransformerConfig =
    TransformerConfig { vocab_size: 1000, d_model: 32, num_heads: 8, d_ff: 64, max_len: 5000, ..TRAINED };

/// Returns what the tutorials print for a model of these sizes: with those that they train, the tree of their larger
/// printed model; with other sizes, that of the model itself. What the model's tokens attend to is not in the tree.
pub fn tutorial_transformer(config: &TransformerConfig) -> ModuleTree {
    let is_trained = TransformerConfig { mask: TRAINED.mask, ..config.clone() } == TRAINED;
    transformer(if is_trained { &PRINTED } else { config })
}

/// Returns what PyTorch prints for a model of these sizes, without creating the model.
pub fn transformer(config: &TransformerConfig) -> ModuleTree {
    let &TransformerConfig { vocab_size, d_model, num_layers, .. } = config;
    ModuleTree::new(
        "Transformer",
        [
            ("embedding", ModuleTree::leaf(format!("Embedding({vocab_size}, {d_model})"))),
            ("pos_encoding", ModuleTree::leaf("PositionalEncoding")),
            ("layers", ModuleTree::list((0..num_layers).map(|_| block(config)))),
            ("out_linear", ModuleTree::linear(d_model, vocab_size)),
        ],
    )
}

fn block(config: &TransformerConfig) -> ModuleTree {
    let &TransformerConfig { d_model, d_ff, dropout, .. } = config;
    let square = || ModuleTree::linear(d_model, d_model);
    let linears = ["q_linear", "k_linear", "v_linear", "out_linear"].map(|name| (name, square()));
    let feed = [("fc1", ModuleTree::linear(d_model, d_ff)), ("fc2", ModuleTree::linear(d_ff, d_model))];
    let norm = || {
        let eps = Float(LAYER_NORM_EPS);
        ModuleTree::leaf(format!("LayerNorm(({d_model},), eps={eps}, elementwise_affine=True)"))
    };
    ModuleTree::new(
        "TransformerBlock",
        [
            ("attention", ModuleTree::new("MultiHeadSelfAttention", linears)),
            ("norm1", norm()),
            ("ffn", ModuleTree::new("FeedForward", feed)),
            ("norm2", norm()),
            ("dropout", ModuleTree::leaf(format!("Dropout(p={}, inplace=False)", Float(dropout)))),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tree_is_the_one_that_the_document_prints() {
        let sizes = (1000, 32, 8, 64, 2, 5000);
        let (vocab_size, d_model, num_heads, d_ff, num_layers, max_len) = sizes;
        let config = TransformerConfig {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers,
            max_len,
            ..TransformerConfig::default()
        };
        let expected = "\
Transformer(
  (embedding): Embedding(1000, 32)
  (pos_encoding): PositionalEncoding()
  (layers): ModuleList(
    (0-1): 2 x TransformerBlock(
      (attention): MultiHeadSelfAttention(
        (q_linear): Linear(in_features=32, out_features=32, bias=True)
        (k_linear): Linear(in_features=32, out_features=32, bias=True)
        (v_linear): Linear(in_features=32, out_features=32, bias=True)
        (out_linear): Linear(in_features=32, out_features=32, bias=True)
      )
      (norm1): LayerNorm((32,), eps=1e-05, elementwise_affine=True)
      (ffn): FeedForward(
        (fc1): Linear(in_features=32, out_features=64, bias=True)
        (fc2): Linear(in_features=64, out_features=32, bias=True)
      )
      (norm2): LayerNorm((32,), eps=1e-05, elementwise_affine=True)
      (dropout): Dropout(p=0.1, inplace=False)
    )
  )
  (out_linear): Linear(in_features=32, out_features=1000, bias=True)
)";
        assert_eq!(transformer(&config).to_string(), expected);
        let one = transformer(&TransformerConfig { num_layers: 1, dropout: 0.0, ..config.clone() });
        assert!(one.to_string().contains("\n    (0): TransformerBlock(\n"));
        assert!(one.to_string().contains("(dropout): Dropout(p=0.0, inplace=False)"));
        let none = transformer(&TransformerConfig { num_layers: 0, ..config });
        assert!(none.to_string().contains("\n  (layers): ModuleList()\n"));
    }
}
