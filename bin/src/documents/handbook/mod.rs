//! The PyTorch handbook: a folder for each of its experiments.

pub mod cifar10;
pub mod ddp_mlp;
pub mod fsdp_mlp;
pub(crate) mod process_groups;
pub(crate) mod sampler;
pub mod tensor_parallel;
