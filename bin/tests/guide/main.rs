//! Tests that README and guide match the program: commands run and use existing options, links have targets, and
//! messages and environment variables are those of the code. The Rust code is run by the doc tests.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;
mod console;
mod links;
mod messages;
mod pages;
mod sources;
mod texts;
mod words;
