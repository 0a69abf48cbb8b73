//! The meeting point: where rank 0 listens and the other ranks connect.

use std::fmt;
use std::path::PathBuf;

use crate::config::address::HostPort;
use crate::config::tcp_config::{agent_store_from_env, master_from_env};
use crate::{InitMethod, Result};

/// Name in errors of the host that an init method names.
pub const HOST: &str = "the meeting point's host";

/// An init method with the values of the environment filled in.
#[derive(Debug, Clone)]
pub(super) enum MeetingPoint {
    Address {
        host: String,
        port: u16,
    },
    File(PathBuf),
    /// `torchrun`'s store, in which rank 0 publishes its address under a key.
    Store {
        host: String,
        port: u16,
        key: String,
    },
}

impl MeetingPoint {
    pub(super) fn of(method: &InitMethod) -> Result<Self> {
        Ok(match method {
            InitMethod::Env => {
                let (host, port) = master_from_env()?;
                match agent_store_from_env() {
                    Some(key) => Self::Store { host, port, key },
                    None => Self::Address { host, port },
                }
            }
            InitMethod::Tcp { host, port } => Self::Address { host: host.clone(), port: *port },
            InitMethod::File(path) => Self::File(path.clone()),
        })
    }
}

impl fmt::Display for MeetingPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { host, port } => HostPort(host, *port).fmt(f),
            Self::Store { host, port, .. } => write!(f, "{} (torchrun's store)", HostPort(host, *port)),
            Self::File(path) => write!(f, "file://{}", path.display()),
        }
    }
}
