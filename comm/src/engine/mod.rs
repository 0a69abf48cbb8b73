//! Running operations: an operation is validated ([`validation`]) and waits in the [`queue`]; the [`runner`] computes its
//! fingerprint and has it planned ([`plan`]); the [`executor`] runs the plan step by step on the elements of its
//! tensors ([`memory`]).

pub(crate) mod executor;
pub(crate) mod memory;
pub(crate) mod overlap;
pub(crate) mod plan;
pub(crate) mod queue;
pub(crate) mod runner;
pub(crate) mod validation;
