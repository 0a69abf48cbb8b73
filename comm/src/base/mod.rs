//! Types used by all layers: operations, their fingerprints and errors, the members of a group, the elements of
//! tensors.

pub(crate) mod buffer;
pub(crate) mod cause;
pub(crate) mod digest;
pub(crate) mod error;
pub(crate) mod fingerprint;
pub(crate) mod last_message;
pub(crate) mod members;
#[cfg(test)]
pub(crate) mod network_model;
pub(crate) mod operation;
pub(crate) mod stats;
pub(crate) mod timespec;
pub(crate) mod tree;

pub(crate) use ops::kernels::lock;
