//! Connections between two processes that have proved to each other that they belong to the same job.

pub(crate) mod acceptor;
pub(crate) mod connect_error;
pub(crate) mod handshake;
pub(crate) mod obstacle;
pub(crate) mod poll_thread;
pub(crate) mod stop;
pub(crate) mod stream;
pub(crate) mod tls;
pub(crate) mod wire;
