//! Groups that lose ranks and get new ones: every test starts real processes, kills or stops some of them, and checks
//! how the others continue. Ranks are further processes of this test binary.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod job;
#[path = "../common/rank.rs"]
mod rank;
mod worker;

mod grown;
mod rounds;
mod shrunk;
