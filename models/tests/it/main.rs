//! The tests of `models` through its public items, in one program, which is quicker built than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod chats;
mod data;
mod folders;
mod generation;
mod layouts;
mod lora;
mod parts;
mod tensor_parallel;
mod tokenizers;
mod tokens;
mod transformers;
