//! Faults between ranks: every test starts real processes that communicate over TCP, causes a fault in one of them, and
//! reads what each of the others reports. Ranks are further processes of this test binary, each with a script.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

/// The transport, unless a test sets another one.
pub(crate) const TRANSPORT: &str = "tcp";
/// The transports of the random rounds, one after the other.
pub(crate) const TRANSPORTS: [&str; 2] = ["tcp", "mixed"];

#[path = "faults/dice.rs"]
mod dice;
#[path = "faults/ending.rs"]
mod ending;
#[path = "faults/group.rs"]
mod group;
#[path = "faults/player.rs"]
mod player;
#[path = "common/rank.rs"]
mod rank;
#[path = "faults/script.rs"]
mod script;
#[path = "common/warnings.rs"]
mod warnings;
#[path = "faults/worker.rs"]
mod worker;

#[path = "faults/apart.rs"]
mod apart;
#[path = "faults/chains.rs"]
mod chains;
#[path = "faults/closing.rs"]
mod closing;
#[path = "faults/crowd.rs"]
mod crowd;
#[path = "faults/killed.rs"]
mod killed;
#[path = "faults/launched.rs"]
mod launched;
#[path = "faults/left.rs"]
mod left;
#[path = "faults/mismatched.rs"]
mod mismatched;
#[path = "faults/rounds.rs"]
mod rounds;
#[path = "faults/slow.rs"]
mod slow;
#[path = "faults/stopped.rs"]
mod stopped;
#[path = "faults/strangers.rs"]
mod strangers;
