//! The experiments, a module for each with its model, its data and its figures. What several documents have in common: [`transformer`],
//! the Transformer of the DDP and pipeline tutorials, and [`python`], what Python prints.

pub mod cifar10;
pub mod ddp_linear;
pub mod ddp_mlp;
pub mod ddp_trainer;
pub mod ddp_transformer;
pub mod fsdp_mlp;
#[cfg(test)]
mod gradients;
pub mod pipeline_transformer;
pub mod process_groups;
pub mod python;
pub mod sampler;
pub mod tensor_parallel;
pub mod transformer;
