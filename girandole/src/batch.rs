//! A batch of rows.

use candle_core::Tensor;
use ops::{Documents, Preferences};

/// Rows that a model is trained or evaluated on. Made of a pair of input and targets, its rows are not packed.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use girandole::comm::Local;
/// use girandole::models::{CausalLm, ModelConfig, Weights};
/// use girandole::ops::Documents;
/// use girandole::{Batch, Layout, Parallel, ParallelConfig};
///
/// # let json = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
/// #     "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 8, "rms_norm_eps": 1e-5,
/// #     "initializer_range": 0.1, "tie_word_embeddings": true, "rope_theta": 10000.0}"#;
/// let config = ModelConfig::from_json(json)?;
/// let layout: Layout = "tp=2".parse()?;
/// // A row of documents of two and of three tokens, and an unused place, whose target does not count.
/// let documents = Documents::new([vec![2, 3]])?;
/// let losses = Local::run_shared(layout.ranks(), |comm| {
///     let (weights, config) = (Weights::random(&config, 1).map_err(girandole::comm::carry)?, config.clone());
///     let build = move |builder: &_| CausalLm::new(&config, builder);
///     let mut model = Parallel::new(comm, &layout, weights.parts(), &ParallelConfig::default(), build)?;
///     let input = Tensor::new(&[[1u32, 2, 7, 8, 9, 0]], &Device::Cpu)?;
///     let targets = Tensor::new(&[[2i64, 3, 8, 9, 10, -100]], &Device::Cpu)?;
///     let batch = Batch { documents: Some(documents.clone()), ..(input, targets).into() };
///     Ok(model.step_batch(&batch)?.loss)
/// })?;
/// assert_eq!(losses[0], losses[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Batch {
    /// The model's input; the first dimension is rows.
    pub input: Tensor,
    /// As many rows of targets.
    pub targets: Tensor,
    /// The documents of packed rows, which attention keeps apart; `None` if each row is one document.
    pub documents: Option<Documents>,
    /// The pairs of answers that the documents are, and their loss, in place of the mean over targets; `None` if they are no pairs.
    pub preferences: Option<Preferences>,
}

impl From<(Tensor, Tensor)> for Batch {
    fn from((input, targets): (Tensor, Tensor)) -> Self {
        Self { input, targets, documents: None, preferences: None }
    }
}
