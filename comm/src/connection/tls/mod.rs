//! Encrypted connections between ranks: TLS 1.3, mutually authenticated, with a key that is derived from the job's
//! secret.
//!
//! There are no certificates to make, to distribute or to renew: every process that holds the secret derives the same
//! Ed25519 key, presents its public half (RFC 7250) and expects the same from the peer. What is sent cannot be read by
//! somebody who learns the secret later, since each connection agrees on keys of its own (ECDHE).

mod identity;
mod session;

pub(crate) use identity::Identity;
#[cfg(test)]
use session::HELLO;
pub(crate) use session::Session;

#[cfg(test)]
mod tests;
