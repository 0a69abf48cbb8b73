//! Ranks as processes that talk over TCP.

mod acceptor;
mod config;
mod fault;
mod handshake;
mod init_method;
mod rendezvous;
mod secret;
mod wire;

pub use config::TcpConfig;
pub use init_method::InitMethod;
pub use secret::Secret;

pub(crate) use rendezvous::{Meeting, PeerInfo, meet};
