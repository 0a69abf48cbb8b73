//! One folder or file an experiment.

pub mod ddp_linear;
pub mod ddp_mlp;
pub mod ddp_trainer;
pub mod ddp_transformer;
