//! Launching real processes: this test binary starts itself as launcher, which starts itself as ranks.
#![cfg(target_os = "linux")]

#[path = "launch/job.rs"]
mod job;
#[path = "launch/roles.rs"]
mod roles;

#[path = "launch/endings.rs"]
mod endings;
#[path = "launch/failures.rs"]
mod failures;
#[path = "launch/output.rs"]
mod output;
#[path = "launch/starting.rs"]
mod starting;
