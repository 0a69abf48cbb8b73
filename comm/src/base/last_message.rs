//! Last message on a stream: sent in place of an announcement when a rank leaves the group or the group has failed.

use crate::base::cause::{Cause, NO_ANSWER};
use crate::base::fingerprint::LEN;

/// Sent when this rank closes its group.
pub(crate) const GOODBYE: [u8; LEN] = *b"GRF1: this rank leaves the group";
/// Prefix of a failure report. One byte for the kind of the cause and four for the rank to blame follow. A capital
/// letter as kind means that another group of the job has failed, and that the rank is that of the whole job.
const FAILURE_REPORT: [u8; LEN - 5] = *b"GRF1: the group fails: rank";
/// Detail of a time-out whose real detail does not fit into the message.
const OTHER_DETAIL: &str = "others waited for it until their time was over";

/// A decoded last message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LastMessage {
    Farewell,
    Blame(Cause),
}

impl LastMessage {
    /// Returns whether `byte` is the first byte of a last message. No answer in the handshake begins with it.
    pub(crate) fn starts_with(byte: u8) -> bool {
        byte == GOODBYE[0]
    }

    /// Returns `None` if the bytes are something else.
    pub(crate) fn decode(bytes: &[u8; LEN]) -> Option<Self> {
        if *bytes == GOODBYE {
            return Some(Self::Farewell);
        }
        let [.., kind, a, b, c, d] = *bytes;
        let rank = u32::from_le_bytes([a, b, c, d]) as usize;
        match kind {
            _ if bytes[..FAILURE_REPORT.len()] != FAILURE_REPORT => None,
            b'd' => Some(Self::Blame(Cause::Died { rank })),
            b'l' => Some(Self::Blame(Cause::Left { rank })),
            b'D' => Some(Self::blame_in_job(Cause::Died { rank })),
            b'L' => Some(Self::blame_in_job(Cause::Left { rank })),
            b'p' => Some(Self::Blame(program(rank))),
            b'P' => Some(Self::blame_in_job(program(rank))),
            b'S' => Some(Self::blame_in_job(Cause::Stalled { rank, detail: NO_ANSWER.into() })),
            b'W' => Some(Self::blame_in_job(Cause::Stalled { rank, detail: OTHER_DETAIL.into() })),
            _ => None,
        }
    }

    fn blame_in_job(cause: Cause) -> Self {
        Self::Blame(Cause::InJob { cause: Box::new(cause), host: String::new() })
    }
}

/// The failure of a rank's program. Its reason does not fit into the message: it comes with the rank's goodbye on its control
/// connection.
fn program(rank: usize) -> Cause {
    Cause::Program { rank, reason: String::new() }
}

/// Encodes a failure report. `None` for a cause that cannot be encoded.
pub(crate) fn encode_failure(cause: &Cause) -> Option<[u8; LEN]> {
    let (kind, rank) = match cause {
        Cause::Died { rank } => (b'd', *rank),
        Cause::Left { rank } => (b'l', *rank),
        Cause::Program { rank, .. } => (b'p', *rank),
        Cause::InJob { cause, .. } => match &**cause {
            Cause::Program { rank, .. } => (b'P', *rank),
            Cause::Died { rank } => (b'D', *rank),
            Cause::Left { rank } => (b'L', *rank),
            Cause::Stalled { rank, detail } if detail == NO_ANSWER => (b'S', *rank),
            Cause::Stalled { rank, .. } => (b'W', *rank),
            _ => return None,
        },
        _ => return None,
    };
    let mut bytes = [0; LEN];
    bytes[..FAILURE_REPORT.len()].copy_from_slice(&FAILURE_REPORT);
    bytes[FAILURE_REPORT.len()] = kind;
    bytes[FAILURE_REPORT.len() + 1..].copy_from_slice(&u32::try_from(rank).ok()?.to_le_bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fingerprint::Fingerprint;

    #[test]
    fn words_are_understood_and_never_taken_for_a_call() {
        for cause in [Cause::Died { rank: 3 }, Cause::Left { rank: 4000 }, program(5)] {
            let words = encode_failure(&cause).unwrap();
            assert_eq!(LastMessage::decode(&words), Some(LastMessage::Blame(cause)));
            assert_eq!(Fingerprint::decode(&words), None);
        }
        let stalled = |detail: &str| Cause::Stalled { rank: 7, detail: detail.into() };
        for cause in [
            Cause::Died { rank: 3 },
            Cause::Left { rank: 5 },
            program(6),
            stalled(NO_ANSWER),
            stalled(OTHER_DETAIL),
        ] {
            let said = LastMessage::blame_in_job(cause);
            let LastMessage::Blame(cause) = &said else { panic!("{said:?}") };
            assert_eq!(LastMessage::decode(&encode_failure(cause).unwrap()), Some(said));
        }
        assert_eq!(LastMessage::decode(&GOODBYE), Some(LastMessage::Farewell));
        assert_eq!(Fingerprint::decode(&GOODBYE), None);
        assert_eq!(LastMessage::decode(&[0; LEN]), None);
        assert_eq!(encode_failure(&Cause::Protocol { rank: 1, detail: String::new() }), None);
    }
}
