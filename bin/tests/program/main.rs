//! Tests of the program: every command is run as a process. One binary for all of them, which links faster, and whose
//! tests wait concurrently.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;

mod cifar10;
#[cfg(target_os = "linux")]
mod claims;
mod comm_bench;
mod commands;
#[cfg(target_os = "linux")]
mod copies;
mod ddp_linear;
mod ddp_mlp;
mod ddp_trainer;
mod ddp_transformer;
mod diverged;
mod export;
#[cfg(target_os = "linux")]
mod far_elastic;
mod fsdp_mlp;
mod in_4_bits;
#[cfg(target_os = "linux")]
mod kills;
mod language;
#[cfg(target_os = "linux")]
mod language_elastic;
mod language_errors;
mod language_experts;
mod language_far;
mod language_folders;
mod language_labels;
mod language_options;
mod language_resume;
#[cfg(target_os = "linux")]
mod launch;
mod lora_variants;
mod pipeline_transformer;
mod plan;
#[cfg(target_os = "linux")]
mod preempted;
mod prefer;
#[cfg(target_os = "linux")]
mod process_groups;
mod processors;
mod recipe;
mod report;
mod rewards;
mod sampler;
mod setup;
mod tensor_parallel;
mod tensorboard;
mod text;
mod tokenize;
#[cfg(target_os = "linux")]
mod watched;
