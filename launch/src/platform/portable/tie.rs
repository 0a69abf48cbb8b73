//! Ties a rank's process to the launcher from its start, whatever program it runs.

use std::process::Command;

/// Does nothing: POSIX has no such feature. A rank that calls `worker_guard` notices the launcher's end, and the reaper
/// (`reaper.rs`) kills all ranks.
pub(crate) fn to_this_thread(_: &mut Command) {}
