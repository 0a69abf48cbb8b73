//! How an operation is run: it is checked ([`mistakes`]), waits in the [`queue`], the [`runner`] gives it its fingerprint and has it
//! planned ([`plan`]), and the [`executor`] carries out the plan, step by step, on the elements of its tensors ([`memory`]).

pub(crate) mod executor;
pub(crate) mod memory;
pub(crate) mod mistakes;
pub(crate) mod overlap;
pub(crate) mod plan;
pub(crate) mod queue;
pub(crate) mod runner;
