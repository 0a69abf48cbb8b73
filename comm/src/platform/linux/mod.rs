//! What Linux offers beside POSIX.

pub(crate) mod machine;
pub(crate) mod memory;
pub(crate) mod socket;
