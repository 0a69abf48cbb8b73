//! The experiments, one module each.

pub mod cifar10;
pub mod ddp_linear;
pub mod ddp_mlp;
pub mod ddp_trainer;
pub mod ddp_transformer;
pub mod fsdp_mlp;
pub mod pipeline_transformer;
pub mod process_groups;
pub mod sampler;
pub mod tensor_parallel;
pub mod transformer_options;
