//! What a rank says in place of an announcement when nothing will come after it.

use crate::base::cause::{Cause, NO_ANSWER};
use crate::base::fingerprint::LEN;

/// This rank closes its group.
pub(crate) const FAREWELL: [u8; LEN] = *b"GRF1: this rank leaves the group";
/// The group has failed for this rank; a byte for the cause and four for the culprit follow. Where that byte is a capital
/// letter, another group of the job has, and the culprit has its number in the job.
const BLAME: [u8; LEN - 5] = *b"GRF1: the group fails: rank";
/// What is left of a time-out's detail where it does not fit in.
const IN_VAIN: &str = "others waited for it until their time was over";

/// What was said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LastWords {
    Farewell,
    Blame(Cause),
}

impl LastWords {
    /// True for the byte that no answer of a rank begins with while a connection is made.
    pub(crate) fn begin_with(byte: u8) -> bool {
        byte == FAREWELL[0]
    }

    /// None where it is something else.
    pub(crate) fn decode(bytes: &[u8; LEN]) -> Option<Self> {
        if *bytes == FAREWELL {
            return Some(Self::Farewell);
        }
        let [.., kind, a, b, c, d] = *bytes;
        let rank = u32::from_le_bytes([a, b, c, d]) as usize;
        match kind {
            _ if bytes[..BLAME.len()] != BLAME => None,
            b'd' => Some(Self::Blame(Cause::Died { rank })),
            b'l' => Some(Self::Blame(Cause::Left { rank })),
            b'D' => Some(Self::blame_in_job(Cause::Died { rank })),
            b'L' => Some(Self::blame_in_job(Cause::Left { rank })),
            b'S' => Some(Self::blame_in_job(Cause::Stalled { rank, detail: NO_ANSWER.into() })),
            b'W' => Some(Self::blame_in_job(Cause::Stalled { rank, detail: IN_VAIN.into() })),
            _ => None,
        }
    }

    fn blame_in_job(cause: Cause) -> Self {
        Self::Blame(Cause::InJob { cause: Box::new(cause), host: String::new() })
    }
}

/// The words that pass a cause on; none for a cause that does not fit in.
pub(crate) fn blame(cause: &Cause) -> Option<[u8; LEN]> {
    let (kind, rank) = match cause {
        Cause::Died { rank } => (b'd', *rank),
        Cause::Left { rank } => (b'l', *rank),
        Cause::InJob { cause, .. } => match &**cause {
            Cause::Died { rank } => (b'D', *rank),
            Cause::Left { rank } => (b'L', *rank),
            Cause::Stalled { rank, detail } if detail == NO_ANSWER => (b'S', *rank),
            Cause::Stalled { rank, .. } => (b'W', *rank),
            _ => return None,
        },
        _ => return None,
    };
    let mut bytes = [0; LEN];
    bytes[..BLAME.len()].copy_from_slice(&BLAME);
    bytes[BLAME.len()] = kind;
    bytes[BLAME.len() + 1..].copy_from_slice(&u32::try_from(rank).ok()?.to_le_bytes());
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::fingerprint::Fingerprint;

    #[test]
    fn words_are_understood_and_never_taken_for_a_call() {
        for cause in [Cause::Died { rank: 3 }, Cause::Left { rank: 4000 }] {
            let words = blame(&cause).unwrap();
            assert_eq!(LastWords::decode(&words), Some(LastWords::Blame(cause)));
            assert_eq!(Fingerprint::decode(&words), None);
        }
        let stalled = |detail: &str| Cause::Stalled { rank: 7, detail: detail.into() };
        for cause in [Cause::Died { rank: 3 }, Cause::Left { rank: 5 }, stalled(NO_ANSWER), stalled(IN_VAIN)]
        {
            let said = LastWords::blame_in_job(cause);
            let LastWords::Blame(cause) = &said else { panic!("{said:?}") };
            assert_eq!(LastWords::decode(&blame(cause).unwrap()), Some(said));
        }
        assert_eq!(LastWords::decode(&FAREWELL), Some(LastWords::Farewell));
        assert_eq!(Fingerprint::decode(&FAREWELL), None);
        assert_eq!(LastWords::decode(&[0; LEN]), None);
        assert_eq!(blame(&Cause::Protocol { rank: 1, detail: String::new() }), None);
    }
}
