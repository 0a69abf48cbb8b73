//! Integration tests of `models`, in one program, which builds faster than one for each file.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod bits;
mod chats;
mod completions;
mod compressed;
mod data;
mod documents;
mod folders;
mod generation;
mod gguf;
mod gguf_read;
mod heads;
mod layouts;
mod lora;
mod lora_heads;
mod lora_variants;
mod packing;
mod pairs;
mod parts;
mod tables;
mod tensor_parallel;
mod tokenizers;
mod tokens;
mod transformers;
