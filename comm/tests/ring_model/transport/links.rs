//! What `ring.rs` takes from the crate.

/// The other end is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed;
