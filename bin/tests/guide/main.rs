//! README and guide are true: their commands run and have the options that they are given, their links lead somewhere, and their
//! messages and variables are those of the code. The doc tests run their Rust code.
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
