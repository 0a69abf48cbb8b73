//! Fuzz targets, as functions of bytes: the input that strangers, other programs or the environment may pass to this
//! crate. Used by `fuzz/` and by the test that runs its seeds. Each panics if a check fails. Not compiled in any other
//! build.
#![allow(missing_docs, clippy::missing_errors_doc, clippy::unwrap_used)]

pub use crate::config::scheduler::fuzz_environment as environment;

use std::collections::VecDeque;

use crate::base::fingerprint::{Fingerprint, LEN};
use crate::base::last_message::{self, LastMessage};
use crate::connection::handshake::{Credentials, fuzz::shake};
use crate::failure::control::fuzz::hear;
use crate::{Secret, rendezvous};

/// The announcement that precedes data on a connection.
pub fn announcement(data: &[u8]) {
    for bytes in data.as_chunks::<LEN>().0 {
        let call = Fingerprint::decode(bytes);
        let words = LastMessage::decode(bytes);
        assert!(call.is_none() || words.is_none(), "both a call and last words");
        if let Some(call) = call {
            assert_eq!(call.encode(), *bytes);
            assert_eq!(call.to_string().lines().count(), 1);
        }
        if let Some(LastMessage::Blame(cause)) = words {
            assert_eq!(last_message::encode_failure(&cause), Some(*bytes));
        }
    }
}

/// Fuzzes all four messages of a handshake: with the proofs of a peer that does not hold the secret, and with valid
/// proofs over contents that no rank sends.
pub fn handshake(data: &[u8]) {
    let secret = Secret::from_hex(&"7b".repeat(32)).unwrap();
    let credentials = Credentials::new(Some(&secret), "fuzz");
    let mut data: VecDeque<u8> = data.iter().copied().collect();
    shake(&credentials, &mut || data.pop_front().unwrap_or_default());
}

/// Fuzzes the messages of the rendezvous.
pub fn meeting(data: &[u8]) {
    rendezvous::fuzz::read(data);
}

/// Fuzzes the messages on control connections, which must decode the same however the stream is split.
pub fn control(data: &[u8]) {
    hear(data);
}

#[cfg(test)]
mod seeds;

#[cfg(test)]
mod tests {
    use super::seeds::{Target, every_change, every_seed};

    const TARGETS: [Target; 5] = [
        ("announcement", super::announcement),
        ("control", super::control),
        ("environment", super::environment),
        ("handshake", super::handshake),
        ("meeting", super::meeting),
    ];

    #[test]
    fn every_seed_passes() {
        every_seed(&TARGETS);
    }

    #[test]
    fn every_change_of_a_seed_passes() {
        every_change(&TARGETS);
    }
}
