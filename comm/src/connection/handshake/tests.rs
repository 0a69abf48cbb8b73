//! Handshake tests: both sides, with messages changed in transit.

use super::*;
use proptest::prelude::*;

const CALLER: ClientClaim = ClientClaim { rank: 3, world_size: 7, purpose: Purpose::Data };
const VERDICT: Verdict = Verdict { status: HandshakeStatus::Admitted, rank: 1, world_size: 7 };

fn credentials(digit: &str, job_id: &str) -> Credentials {
    Credentials::new(Some(&Secret::from_hex(&digit.repeat(64)).unwrap()), job_id)
}

/// Runs a handshake; `tamper` may change each of the four messages in transit.
fn shake(
    client: &Credentials,
    server: &Credentials,
    tamper: impl Fn(usize, &mut [u8]),
) -> ConnectResult<(ClientClaim, Verdict)> {
    let client = Client::new(client, CALLER)?;
    let mut opening = *client.opening();
    tamper(0, &mut opening);
    let server = Server::new(server, opening)?;
    let mut opening = *server.opening();
    tamper(1, &mut opening);
    let (mut claim, claimed) = client.claim(opening)?;
    tamper(2, &mut claim);
    let admission = server.check(claim)?;
    let mut answer = admission.answer(VERDICT);
    tamper(3, &mut answer);
    Ok((admission.caller, claimed.check(&answer)?))
}

#[test]
fn both_sides_learn_who_the_other_is() {
    for credentials in [credentials("a", "job"), Credentials::new(None, "")] {
        assert_eq!(shake(&credentials, &credentials, |_, _| {}).unwrap(), (CALLER, VERDICT));
    }
}

#[test]
fn another_secret_job_or_meeting_is_refused() {
    let right = credentials("a", "job");
    for wrong in [
        credentials("b", "job"),
        credentials("a", "jab"),
        credentials("a", ""),
        Credentials::new(None, "job"),
        right.bound_to(&[0; 32]),
    ] {
        assert!(matches!(shake(&wrong, &right, |_, _| {}), Err(ConnectError::BadProof)));
        assert!(matches!(shake(&right, &wrong, |_, _| {}), Err(ConnectError::BadProof)));
    }
    let (one, other) = (right.bound_to(&[1; 32]), right.bound_to(&[2; 32]));
    assert!(matches!(shake(&one, &other, |_, _| {}), Err(ConnectError::BadProof)));
    assert!(shake(&one, &right.bound_to(&[1; 32]), |_, _| {}).is_ok());
}

#[test]
fn every_change_of_every_bit_of_every_message_is_refused() {
    let credentials = credentials("a", "job");
    for (message, length) in [42, 42, 41, 41].into_iter().enumerate() {
        for (byte, bit) in (0..length).flat_map(|byte| (0..8).map(move |bit| (byte, bit))) {
            let tamper = |at: usize, bytes: &mut [u8]| {
                if at == message {
                    bytes[byte] ^= 1 << bit;
                }
            };
            assert!(
                shake(&credentials, &credentials, tamper).is_err(),
                "message {message}, byte {byte}, bit {bit}"
            );
        }
    }
}

#[test]
fn a_claim_is_good_for_one_connection() {
    let credentials = credentials("a", "job");
    let client = Client::new(&credentials, CALLER).unwrap();
    let opening = *client.opening();
    let first = Server::new(&credentials, opening).unwrap();
    let second = Server::new(&credentials, opening).unwrap();
    let (claim, _) = client.claim(*first.opening()).unwrap();
    assert!(first.check(claim).is_ok());
    assert!(matches!(second.check(claim), Err(ConnectError::BadProof)));
}

#[test]
fn nothing_can_be_sent_back_to_whom_it_came_from() {
    let credentials = credentials("a", "job");
    let client = Client::new(&credentials, CALLER).unwrap();
    let opening = *client.opening();
    assert!(matches!(client.claim(opening), Err(ConnectError::NotOurs)));

    let client = Client::new(&credentials, CALLER).unwrap();
    let (claim, claimed) = client.claim(super::opening(VERSION).unwrap()).unwrap();
    assert!(matches!(claimed.check(&claim), Err(ConnectError::BadProof)));
}

#[test]
fn who_knocks_without_the_secret_is_told_so() {
    let client = Client::new(&credentials("b", "job"), CALLER).map(|client| *client.opening()).unwrap();
    assert!(matches!(Server::new(&credentials("a", "job"), client), Err(ConnectError::BadProof)));
    let told = Server::no_secret().unwrap();
    let credentials = credentials("b", "job");
    let claim = Client::new(&credentials, CALLER).unwrap().claim(told);
    assert!(matches!(claim, Err(ConnectError::ProofRefused)));
}

#[test]
fn another_version_is_told_apart_from_rubbish() {
    let credentials = credentials("a", "job");
    let mut opening = super::opening(VERSION).unwrap();
    opening[8] += 1;
    let theirs = crate::connection::connect_error::VERSION + 1;
    assert!(
        matches!(Server::new(&credentials, opening), Err(ConnectError::Version(version)) if version == theirs)
    );
    let claim = Client::new(&credentials, CALLER).unwrap().claim(opening);
    assert!(matches!(claim, Err(ConnectError::Version(version)) if version == theirs));
    assert!(matches!(Server::new(&credentials, [b'G'; 42]), Err(ConnectError::NotOurs)));
}

proptest! {
    #[test]
    fn no_bytes_are_let_in(nonce: [u8; 32], said: [u8; 9], proof: [u8; 32], is_ours: bool) {
        let credentials = Credentials::new(None, "");
        let mut message = [0; 42];
        message[10..].copy_from_slice(&nonce);
        if is_ours {
            message[..8].copy_from_slice(&MAGIC);
            message[8] = VERSION as u8;
            prop_assert!(matches!(Server::new(&credentials, message), Err(ConnectError::BadProof)));
            let proof = credentials.opening_proof(&message).finalize().into_bytes();
            message[OPENING_PROOF..].copy_from_slice(&proof[..OPENING - OPENING_PROOF]);
        }
        let mut claim = [0; 41];
        claim[..9].copy_from_slice(&said);
        claim[9..].copy_from_slice(&proof);
        match Server::new(&credentials, message) {
            Ok(server) => prop_assert!(is_ours && server.check(claim).is_err()),
            Err(_) => prop_assert!(!is_ours),
        }
        let (_, claimed) = Client::new(&credentials, CALLER).unwrap().claim(super::opening(VERSION).unwrap()).unwrap();
        prop_assert!(claimed.check(&claim).is_err());
    }
}
