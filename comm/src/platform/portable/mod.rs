//! What POSIX offers, and where that is not enough, what Apple's systems do (`apple`). A build for Linux that takes this way has a
//! stand-in for the latter.

#[cfg_attr(not(target_vendor = "apple"), path = "stand_in.rs")]
mod apple;
pub(crate) mod bell;
pub(crate) mod local;
pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod shared;
pub(crate) mod socket;
