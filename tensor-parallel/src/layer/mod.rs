//! Tensor-parallel layers.

mod attention;
mod column;
mod embedding;
mod mlp;
mod module;
mod norm;
mod row;
mod transformer;

pub use attention::ParallelSelfAttention;
pub use column::{ColumnConfig, ColumnParallelLinear};
pub use embedding::VocabParallelEmbedding;
pub use mlp::ParallelMlp;
pub use norm::norm;
pub use row::{RowConfig, RowParallelLinear};
pub(crate) use transformer::dropout_between;
pub use transformer::{ParallelTransformerLayer, TransformerLayerConfig};
