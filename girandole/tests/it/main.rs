//! The tests of `girandole` through its public items, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod adapter_variants;
mod adapters;
mod checkpoints;
mod divided_experts;
mod documents;
mod elastic;
mod elastic_origin;
mod empty;
mod evaluation;
mod far;
mod far_by_hand;
mod far_elastic;
mod far_losses;
mod gradient_check;
mod heads;
mod key_masks;
mod layouts;
mod loss_scale;
mod lost_twice;
mod muon;
mod optimizers;
mod own_model;
mod preferences;
mod prompts;
mod reads;
mod recompute;
mod replaced;
mod stages;
mod statistics;
mod strategies;
mod training;
mod units;
