//! Groups that lose ranks, and get new ones: every test starts real processes, hurts some of them, and looks how the others
//! go on. Ranks are this test binary, started anew.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod job;
#[path = "../common/rank.rs"]
mod rank;
mod worker;

mod grown;
mod rounds;
mod shrunk;
