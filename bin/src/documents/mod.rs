//! The documents, a folder for each with its models, its data, its experiments and its tables. What several of them have in
//! common is in [`shared`].

pub(crate) mod ddp_tutorial;
pub(crate) mod from_scratch_tutorial;
pub mod handbook;
pub mod pipeline_tutorial;
pub mod shared;
pub(crate) mod trainer_tutorial;
