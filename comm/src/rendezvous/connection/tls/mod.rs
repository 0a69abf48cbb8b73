//! Encrypted connections between ranks: TLS 1.3, mutually authenticated, with a key that is derived from the job's
//! secret.
//!
//! There are no certificates to make, to distribute or to renew: every process that holds the secret derives the same
//! Ed25519 key, presents its public half (RFC 7250) and expects the same from the peer. What is sent cannot be read by
//! somebody who learns the secret later, since each connection agrees on keys of its own (ECDHE).

mod identity;
mod session;

use std::fmt;
use std::str::FromStr;

pub(crate) use identity::Identity;
#[cfg(test)]
use session::HELLO;
pub(crate) use session::Session;

use crate::Error;

/// Which TCP connections are encrypted. Shared memory never is: only the two ranks can see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tls {
    /// None. Anybody who can listen to the network sees the model.
    #[default]
    Off,
    /// Connections between hosts; those within one (on loopback, or from an address to itself) are not.
    Hosts,
    /// All.
    All,
}

impl Tls {
    /// Returns whether a connection is to be encrypted; `is_local` where both of its ends are on one host.
    pub(crate) fn covers(self, is_local: bool) -> bool {
        match self {
            Self::Off => false,
            Self::Hosts => !is_local,
            Self::All => true,
        }
    }
}

impl FromStr for Tls {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "off" => Ok(Self::Off),
            "hosts" => Ok(Self::Hosts),
            "all" => Ok(Self::All),
            _ => Err(Error::invalid("TLS", text, "give off, hosts or all")),
        }
    }
}

impl fmt::Display for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Off => "off",
            Self::Hosts => "hosts",
            Self::All => "all",
        })
    }
}

#[cfg(test)]
mod tests;
