//! What comes over a connection, for [`crate::fuzz`].
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use crate::Secret;
use crate::blame::control;
use crate::rendezvous::connection::handshake::{self, Credentials};
use crate::rendezvous::meeting;

/// All four messages of a handshake: with the proofs of somebody who does not have the secret, and with those of one who
/// has, and sends what no rank sends.
pub fn handshake(data: &[u8]) {
    let secret = Secret::from_hex(&"7b".repeat(32)).unwrap();
    let credentials = Credentials::new(Some(&secret), "fuzz");
    let mut data: VecDeque<u8> = data.iter().copied().collect();
    handshake::fuzz::shake(&credentials, &mut || data.pop_front().unwrap_or_default());
}

/// The messages between ranks that meet.
pub fn meeting(data: &[u8]) {
    meeting::fuzz::read(data);
}

/// The messages between ranks that watch over each other: the same however they are split on their way.
pub fn control(data: &[u8]) {
    control::fuzz::hear(data);
}
