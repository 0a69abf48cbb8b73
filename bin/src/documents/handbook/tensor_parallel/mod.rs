//! `tensor-parallel-mlp` and `tensor-parallel-transformer`, from the PyTorch handbook: layers divided over ranks,
//! with the memory and communication compared to data parallelism.

pub mod mesh;
mod mlp;
mod transformer;

pub use mlp::{Mlp, TensorParallelMlpOptions};
pub use transformer::TensorParallelTransformerOptions;
