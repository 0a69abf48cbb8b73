//! The implementation for Linux, with features beyond POSIX.

mod cgroup;
pub(crate) mod local;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod ready_set;
pub(crate) mod shared;
pub(crate) mod socket;
pub(crate) mod tcp_info;
mod user;
pub(crate) mod wake_up;
