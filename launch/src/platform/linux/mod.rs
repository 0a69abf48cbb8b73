//! Functions that use Linux features beyond POSIX.

pub(crate) mod exits;
pub(crate) mod guard;
pub(crate) mod processes;
pub(crate) mod program;
pub(crate) mod socket;
pub(crate) mod tie;
