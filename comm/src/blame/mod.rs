//! Failure detection: the control connections between ranks ([`control`]), the choice of the one cause that all of them
//! report ([`verdict`]), and time-outs of operations ([`patience`]).

pub(crate) mod causes;
pub(crate) mod control;
pub(crate) mod ending;
pub(crate) mod patience;
pub(crate) mod supervisor;
pub(crate) mod verdict;
