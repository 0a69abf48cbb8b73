//! Time-outs of system calls.

use std::time::Duration;

use rustix::event::Timespec;

/// A time-out as the system takes it, an hour at most.
pub(crate) fn timespec(timeout: Duration) -> Timespec {
    let timeout = timeout.min(Duration::from_secs(3600));
    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) }
}
