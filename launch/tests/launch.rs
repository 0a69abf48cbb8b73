//! Launching real processes: this test binary starts itself as launcher, which starts itself as ranks.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "all of it is test")]

#[path = "launch/job.rs"]
mod job;
#[path = "../../bin/tests/common/port.rs"]
mod port;
#[path = "launch/roles.rs"]
mod roles;
#[path = "common/warnings.rs"]
mod warnings;

#[path = "launch/elastic.rs"]
mod elastic;
#[path = "launch/endings.rs"]
mod endings;
#[path = "launch/failures.rs"]
mod failures;
#[path = "launch/nodes.rs"]
mod nodes;
#[path = "launch/output.rs"]
mod output;
#[path = "launch/starting.rs"]
mod starting;
