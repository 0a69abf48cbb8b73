//! Fuzz target: both sides of a handshake against arbitrary bytes.
#![allow(clippy::unwrap_used)]

use super::*;

fn take<const N: usize>(next: &mut dyn FnMut() -> u8) -> [u8; N] {
    std::array::from_fn(|_| next())
}

/// Runs both sides; the bytes that they receive come from `next`.
pub(crate) fn shake(credentials: &Credentials, next: &mut dyn FnMut() -> u8) {
    let mut theirs: Opening = take(next);
    if next() & 1 == 1 {
        let proof = credentials.opening_proof(&theirs).finalize().into_bytes();
        theirs[OPENING_PROOF..].copy_from_slice(&proof[..OPENING - OPENING_PROOF]);
    }
    if let Ok(server) = Server::new(credentials, theirs) {
        let ours = *server.opening();
        assert!(server.check(take(next)).is_err(), "a claim without proof was believed");
        let server = Server { credentials, client: theirs, opening: ours };
        prove(credentials, server, next);
    }
    let client =
        Client::new(credentials, ClientClaim { rank: 1, world_size: 2, purpose: Purpose::Data }).unwrap();
    if let Ok((_, claimed)) = client.claim(take(next)) {
        assert!(claimed.check(&take(next)).is_err(), "an answer without proof was believed");
        let mut answer: Answer = take(next);
        let said = &answer[..9];
        let proof = credentials.server_proof(&claimed.client, &claimed.server, &claimed.claim, said);
        answer[9..].copy_from_slice(&proof.finalize().into_bytes());
        assert_eq!(claimed.check(&answer).is_ok(), answer[0] < 5);
    }
    assert!(!is_plain(&take::<4>(next)));
    is_plain(&take::<8>(next));
}

/// Checks a claim with valid proof and arbitrary contents.
fn prove(credentials: &Credentials, server: Server<'_>, next: &mut dyn FnMut() -> u8) {
    let said: [u8; 9] = take(next);
    let mut claim = [0; 41];
    claim[..9].copy_from_slice(&said);
    let proof = credentials.client_proof(&server.client, &server.opening, &said);
    claim[9..].copy_from_slice(&proof.finalize().into_bytes());
    let Ok(admission) = server.check(claim) else {
        assert!(!matches!(said[8], 1 | 2), "a claim with proof was refused");
        return;
    };
    let ClientClaim { rank, world_size, purpose } = admission.caller;
    let bytes = [&rank.to_le_bytes()[..], &world_size.to_le_bytes(), &[purpose as u8]].concat();
    assert_eq!(bytes, said);
    admission.answer(Verdict { status: HandshakeStatus::Crossed, rank: 1, world_size: 2 });
}
