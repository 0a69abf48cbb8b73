//! `plan`: its formulas against what runs measure, and what it prints.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod formulas;
mod output;
mod runs;

const PLAN: common::Girandole = common::Girandole("plan");
