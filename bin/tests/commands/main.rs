//! What all commands promise: one line where something cannot be, whatever is typed.
#![allow(clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod huge;
mod kept;
#[cfg(target_os = "linux")]
mod paths;
mod workers;
