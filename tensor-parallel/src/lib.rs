//! Tensor parallelism: every layer of a model is divided over ranks, as in Megatron-LM.
//!
//! A matrix product whose weight is divided by its outputs ([`ColumnParallelLinear`]), followed by one whose weight is
//! divided by its inputs ([`RowParallelLinear`]), needs one all-reduce in forward and one in backward for both together.
//! [`ParallelMlp`], [`ParallelSelfAttention`], [`ParallelTransformerLayer`] and [`LanguageModel`] consist of them. No rank
//! holds a whole divided weight, nor, with [`vocab_parallel_cross_entropy`], whole logits.
//!
//! [`TensorParallel`] builds a model on the ranks of a [`comm::Mesh`]. The parts are slices of the weights that a single process
//! would have from the same seed, or from a file, so losses and weights equal those of a single process, up to rounding:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::Optimizer;
//! use comm::{Local, Mesh};
//! use tensor_parallel::{DistributedModel, LanguageModel, LanguageModelConfig, TensorParallel, TensorParallelConfig, Weights};
//! use training::{Adam, AdamConfig};
//!
//! let sizes = LanguageModelConfig { vocab_size: 20, d_model: 8, num_heads: 2, num_layers: 1, max_len: 6, ..Default::default() };
//! let losses = Local::run_shared(2, |comm| {
//!     let mesh = Mesh::new(comm, &[("dp", 1), ("tp", 2)])?;
//!     let config = TensorParallelConfig { sequence_parallel: true, ..Default::default() };
//!     let model = |builder| LanguageModel::new(builder, &sizes);
//!     let parallel = TensorParallel::new(&mesh, &config, &Weights::seed(42), model)?;
//!     let config = AdamConfig { learning_rate: 0.05, ..AdamConfig::default() };
//!     let mut optimizer = Adam::named(parallel.named_vars(), config).map_err(candle_core::Error::from)?;
//!     let tokens = Tensor::zeros((3, 6), DType::U32, &Device::Cpu)?;
//!     for _ in 0..20 {
//!         let loss = parallel.model()?.loss(&tokens, &tokens)?;
//!         let mut grads = parallel.backward(&loss)?;
//!         parallel.clip_grad_norm(&mut grads, 1.0)?; // by the norm over all ranks
//!         optimizer.step(&grads)?;
//!     }
//!     Ok(parallel.model()?.loss(&tokens, &tokens)?.to_scalar::<f32>()?)
//! })?;
//! assert!(losses[0] == losses[1] && losses[0] < 2.0);
//! # Ok::<(), comm::Error>(())
//! ```
//!
//! Read it in this order: [`TensorParallel`]; [`ShardBuilder`], which gives a layer its part of a weight; the two linear layers;
//! the layers made of them; [`Context`], for layers of your own.
//!
//! [`Shards`] supplies such layers to a model that is built and trained by something else, such as a pipeline.
//!
//! A failure on one rank is an error on every rank.
#![forbid(unsafe_code)]

mod builder;
mod compare;
mod context;
mod division;
mod error;
mod language_model;
mod layer;
mod op;
mod parallel;
mod parameter;
mod pieces;
mod random;
mod same_model;
mod shards;
mod source;
mod split;
mod units;

pub use builder::{ShardBuilder, WeightParts, Weights};
pub use context::{Context, TensorParallelConfig};
pub use error::{Error, Result};
pub use language_model::{LanguageModel, LanguageModelConfig};
pub use layer::{
    ColumnConfig, ColumnParallelLinear, ParallelMlp, ParallelSelfAttention, ParallelTransformerLayer,
    RowConfig, RowParallelLinear, TransformerLayerConfig, VocabParallelEmbedding, norm,
};
pub use op::{vocab_parallel_cross_entropy, vocab_parallel_log_probs};
pub use parallel::TensorParallel;
pub use parameter::Parameter;
pub use random::RandomStreams;
pub use shards::Shards;
pub use split::Split;
pub use strategy::DistributedModel;
