//! Conversion of time-outs for system calls.

use std::time::Duration;

use rustix::event::Timespec;

/// Converts a time-out for system calls. It is limited to one hour.
pub(crate) fn timespec(timeout: Duration) -> Timespec {
    let timeout = timeout.min(Duration::from_secs(3600));
    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) }
}
