//! Setting up shared memory between two ranks, over their new connection, in three exchanges: each rank's offer, whether
//! each could send its memory, and whether each could take the other's. Both ranks learn of any failure on either side.

use std::time::{Duration, Instant};

use crate::base::last_message::LastMessage;
use crate::connection::connect_error::{ConnectError, ConnectResult};
use crate::connection::obstacle::Obstacle;
use crate::connection::wire::HandshakeStream;

use super::host::{ExchangeSocket, RingPair, SharedMemory};
use super::{Name, Token};

/// How long passing the memory may take; normally microseconds.
const TIMEOUT: Duration = Duration::from_secs(10);
const OFFER: usize = 1 + size_of::<Name>() + size_of::<Token>();

/// The first message of each rank.
struct Offer {
    obstacle: Option<Obstacle>,
    name: Name,
    /// Found in the memory of the stream that goes to the sender of this offer.
    token: Token,
}

impl Offer {
    fn encode(&self) -> [u8; OFFER] {
        let mut bytes = [0; OFFER];
        bytes[0] = Obstacle::to_byte(self.obstacle);
        bytes[1..17].copy_from_slice(&self.name);
        bytes[17..].copy_from_slice(&self.token);
        bytes
    }

    fn decode(obstacle: u8, rest: &[u8; OFFER - 1]) -> Self {
        let (mut name, mut token) = (Name::default(), Token::default());
        name.copy_from_slice(&rest[..16]);
        token.copy_from_slice(&rest[16..]);
        Self { obstacle: Obstacle::from_byte(obstacle), name, token }
    }
}

/// Sets up the memory between this rank and the one at the other end of `wire`, which makes the same call. Both get the
/// same kind of result: the two streams, or the reason why memory cannot be shared.
pub(crate) fn share(
    host: &SharedMemory,
    wire: &mut HandshakeStream,
    deadline: Instant,
) -> ConnectResult<std::result::Result<RingPair, Obstacle>> {
    let mut own = Token::default();
    getrandom::fill(&mut own).map_err(|_| ConnectError::NoRandomness)?;
    let time_limit = deadline.min(Instant::now() + TIMEOUT);
    let counter = host.open_counter();
    let name = counter.as_ref().map(ExchangeSocket::name).unwrap_or_default();
    let offer = Offer { obstacle: counter.as_ref().err().copied(), name, token: own };
    wire.write(&offer.encode(), deadline)?;
    let first = read_first_byte(wire, deadline)?;
    let theirs = Offer::decode(first, &wire.read(deadline)?);
    let mut counter = match (counter, theirs.obstacle) {
        (Err(obstacle), _) | (Ok(_), Some(obstacle)) => return Ok(Err(obstacle)),
        (Ok(counter), None) => counter,
    };
    let given = counter.give(&theirs.name, &own, time_limit);
    let inbox = match exchange_outcome(wire, given, deadline)? {
        Ok(inbox) => inbox,
        Err(obstacle) => return Ok(Err(obstacle)),
    };
    let taken = counter.take(inbox, &theirs.token, time_limit);
    exchange_outcome(wire, taken, deadline)
}

/// Exchanges what prevents sharing, if anything. Where something does, both then check that the other is still connected:
/// a rank that leaves closes its sockets too, which must be reported as its departure and not as an obstacle to sharing.
fn exchange_outcome<T>(
    wire: &mut HandshakeStream,
    outcome: std::result::Result<T, Obstacle>,
    deadline: Instant,
) -> ConnectResult<std::result::Result<T, Obstacle>> {
    wire.write(&[Obstacle::to_byte(outcome.as_ref().err().copied())], deadline)?;
    let outcome = match Obstacle::from_byte(read_first_byte(wire, deadline)?) {
        Some(obstacle) => outcome.and(Err(obstacle)),
        None => outcome,
    };
    if outcome.is_err() {
        wire.write(&[0], deadline)?;
        read_first_byte(wire, deadline)?;
    }
    Ok(outcome)
}

/// Reads the first byte of an answer. A rank whose group ends meanwhile sends its last message instead, which becomes the
/// error.
fn read_first_byte(wire: &mut HandshakeStream, deadline: Instant) -> ConnectResult<u8> {
    let [first] = wire.read(deadline)?;
    match LastMessage::starts_with(first) {
        true => {
            Err(wire.read_last_words(Some(first), deadline).map_or(ConnectError::Closed, ConnectError::Gone))
        }
        false => Ok(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_arrives_as_it_was_sent() {
        let sent = Offer { obstacle: Some(Obstacle::Unwanted), name: [2; 16], token: [3; 32] };
        let bytes = sent.encode();
        let got = Offer::decode(bytes[0], bytes[1..].try_into().unwrap());
        assert_eq!((got.obstacle, got.name, got.token), (sent.obstacle, sent.name, sent.token));
    }
}
