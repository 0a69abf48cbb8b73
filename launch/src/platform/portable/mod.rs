//! What POSIX offers, and where that is not enough, what Apple's systems do (`apple`). A build for Linux that takes this way has a
//! stand-in for the latter.

#[cfg_attr(not(target_vendor = "apple"), path = "stand_in.rs")]
mod apple;
mod arguments;
pub(crate) mod dispositions;
pub(crate) mod exits;
pub(crate) mod guard;
pub(crate) mod processes;
pub(crate) mod program;
pub(crate) mod socket;
pub(crate) mod tie;
