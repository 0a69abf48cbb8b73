//! Functions for POSIX systems. Where POSIX is not enough, `apple` has the calls of Apple's systems; a build for Linux
//! with `--cfg portable` uses a stand-in.

#[cfg_attr(not(target_vendor = "apple"), path = "stand_in.rs")]
mod apple;
mod arguments;
pub(crate) mod exits;
pub(crate) mod guard;
pub(crate) mod processes;
pub(crate) mod program;
pub(crate) mod socket;
pub(crate) mod tie;
