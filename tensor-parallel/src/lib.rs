//! Tensor parallelism: every layer of a model is divided over ranks, as in Megatron-LM.
//!
//! A matrix product whose weight is divided by its outputs ([`ColumnParallelLinear`]), followed by one whose weight is
//! divided by its inputs ([`RowParallelLinear`]), needs one all-reduce in forward and one in backward for both together.
//! [`ParallelMlp`], [`ParallelSelfAttention`], [`ParallelTransformerLayer`] and [`LanguageModel`] consist of them. No rank
//! holds a whole divided weight, nor, with [`vocab_parallel_cross_entropy`], whole logits.
//!
//! [`TensorParallel`] builds a model on the ranks of a [`comm::Mesh`]; its documentation contains a training loop. The parts
//! are slices of the weights that a single process would have from the same seed, or from a file, so losses and weights equal
//! those of a single process, up to rounding.
//!
//! [`Shards`] supplies such layers to a model that is built and trained by something else, such as a pipeline.
//!
//! A failure on one rank is an error on every rank.
#![forbid(unsafe_code)]

mod agreement;
mod averaging;
mod builder;
mod checkpoint;
mod clip;
mod context;
mod division;
mod error;
mod file;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod language_model;
mod layer;
mod op;
mod parallel;
mod random;
mod save;
mod shards;
mod source;
mod split;
mod units;
mod visit;

pub use builder::{Parameter, ShardBuilder, WeightParts, Weights};
pub use context::{Context, TensorParallelConfig};
pub use error::{Error, Result};
#[cfg(any(test, fuzzing))]
pub use fuzz::fuzz_tensor_file;
pub use language_model::{LanguageModel, LanguageModelConfig};
pub use layer::{
    ColumnConfig, ColumnParallelLinear, ParallelMlp, ParallelSelfAttention, ParallelTransformerLayer,
    RowConfig, RowParallelLinear, TransformerLayerConfig, VocabParallelEmbedding, norm,
};
pub use op::vocab_parallel_cross_entropy;
pub use parallel::TensorParallel;
pub use random::RandomStreams;
pub use shards::Shards;
pub use split::Split;
