//! One folder or file an experiment.

pub mod ddp_linear;
pub mod process_groups;
