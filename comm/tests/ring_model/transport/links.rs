//! Type that `ring.rs` imports from the crate.

/// The other end is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed;
