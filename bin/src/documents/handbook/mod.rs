//! The PyTorch handbook: a folder for each of its experiments.

pub mod cifar10;
pub mod ddp_mlp;
pub mod fsdp_mlp;
pub mod process_groups;
pub mod sampler;
pub mod tensor_parallel;
