//! Fuzz targets for data that arrives over a connection, for [`crate::fuzz`].
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use crate::Secret;
use crate::blame::control;
use crate::rendezvous::connection::handshake::{self, Credentials};
use crate::rendezvous::meeting;

/// Fuzzes all four messages of a handshake: with the proofs of a peer that does not hold the secret, and with valid
/// proofs over contents that no rank sends.
pub fn handshake(data: &[u8]) {
    let secret = Secret::from_hex(&"7b".repeat(32)).unwrap();
    let credentials = Credentials::new(Some(&secret), "fuzz");
    let mut data: VecDeque<u8> = data.iter().copied().collect();
    handshake::fuzz::shake(&credentials, &mut || data.pop_front().unwrap_or_default());
}

/// Fuzzes the messages of the rendezvous.
pub fn meeting(data: &[u8]) {
    meeting::fuzz::read(data);
}

/// Fuzzes the messages on control connections, which must decode the same however the stream is split.
pub fn control(data: &[u8]) {
    control::fuzz::hear(data);
}
