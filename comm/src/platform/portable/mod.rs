//! The implementation by POSIX functions, and by those of Apple's systems where POSIX is not enough (`apple`). A build of
//! it for Linux has a replacement for `apple`.

#[cfg_attr(not(target_vendor = "apple"), path = "stand_in.rs")]
mod apple;
pub(crate) mod local;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod ready_set;
pub(crate) mod shared;
pub(crate) mod socket;
pub(crate) mod tcp_info;
pub(crate) mod wake_up;
