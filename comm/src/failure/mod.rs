//! Failure detection: the control connections between ranks ([`control`]), the choice of the one cause that all of them
//! report ([`diagnosis`]), and time-outs of operations ([`timeouts`]).

pub(crate) mod control;
pub(crate) mod diagnosis;
pub(crate) mod peer_failures;
pub(crate) mod shutdown;
pub(crate) mod supervisor;
pub(crate) mod timeouts;
