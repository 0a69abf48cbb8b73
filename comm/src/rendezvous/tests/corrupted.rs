//! An attacker between two ranks who changes or replays their messages.

use std::net::Shutdown;
use std::time::Instant;

use super::*;
use crate::connection::connect_error::ConnectResult;
use crate::connection::handshake::{ClientClaim, HandshakeStatus, OPENING, Purpose, Verdict};
use crate::connection::wire::HandshakeStream;

/// Lengths of the four messages in bytes, starting with the client's first.
const MESSAGES: [usize; 4] = [42, 42, 41, 41];
/// The third turns the first byte of an encrypted record into a `g`.
const MASKS: [u8; 4] = [0x01, 0x80, b'g' ^ 22, 0xff];

/// Passes the messages on, in turn, each changed by `change`.
fn relay(mut client: TcpStream, mut server: TcpStream, mut change: impl FnMut(usize, &mut [u8])) {
    for (message, len) in MESSAGES.into_iter().enumerate() {
        let mut bytes = vec![0; len];
        let (from, to) =
            if message.is_multiple_of(2) { (&mut client, &mut server) } else { (&mut server, &mut client) };
        if from.read_exact(&mut bytes).is_err() {
            break;
        }
        change(message, &mut bytes);
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
}

/// Runs the listening side; returns the client that it has accepted.
fn listen(
    listener: &TcpListener,
    credentials: &Credentials,
    time_limit: Duration,
) -> ConnectResult<ClientClaim> {
    let deadline = Instant::now() + time_limit;
    let mut wire = HandshakeStream::new(listener.accept().unwrap().0, None)?;
    let admission = wire.accept(credentials, deadline)?;
    let answer = admission.answer(Verdict { status: HandshakeStatus::Admitted, rank: 0, world_size: 2 });
    wire.write(&answer, deadline)?;
    Ok(admission.caller)
}

/// Returns the results of a handshake on both sides, that of the listening side first.
fn shake(
    credentials: &Credentials,
    caller: ClientClaim,
    change: impl FnMut(usize, &mut [u8]) + Send,
) -> (ConnectResult<ClientClaim>, ConnectResult<Verdict>) {
    let ((listener, port), (between, entrance)) = (point(), point());
    thread::scope(|scope| {
        let server = scope.spawn(move || listen(&listener, credentials, LONG));
        scope.spawn(move || {
            let client = between.accept().unwrap().0;
            relay(client, TcpStream::connect(("127.0.0.1", port)).unwrap(), change);
        });
        let address = ([127, 0, 0, 1], entrance).into();
        let client = HandshakeStream::connect(address, credentials, caller, Instant::now() + LONG);
        (server.join().unwrap(), client.map(|(_, verdict)| verdict))
    })
}

/// Credentials and purposes of ranks that meet, of data connections, and of launchers that meet.
fn kinds() -> [(Credentials, Purpose); 3] {
    let of = |job: &str| Credentials::new(secret().as_ref(), job);
    [
        (of("job"), Purpose::Control),
        (of("job").bound_to(&[3; 32]), Purpose::Data),
        (of("launchers"), Purpose::Control),
    ]
}

#[test]
fn every_byte_of_a_handshake_counts() {
    for (credentials, purpose) in kinds() {
        let caller = ClientClaim { rank: 1, world_size: 2, purpose };
        let (server, client) = shake(&credentials, caller, |_, _| {});
        assert_eq!((server.unwrap(), client.unwrap().status), (caller, HandshakeStatus::Admitted));
        let bytes = MESSAGES.iter().enumerate().flat_map(|(at, &len)| (0..len).map(move |byte| (at, byte)));
        let cases: Vec<_> = bytes.flat_map(|case| MASKS.map(move |mask| (case.0, case.1, mask))).collect();
        for (message, byte, mask) in cases {
            let (server, client) = shake(&credentials, caller, |at, bytes| {
                if at == message {
                    bytes[byte] ^= mask;
                }
            });
            let what = format!("message {message}, byte {byte}, mask {mask:02x}");
            assert!(client.is_err(), "{what}: the client goes on");
            // It does not learn what becomes of its own last message.
            assert!(message == 3 || server.is_err(), "{what}: the server goes on");
        }
    }
}

#[test]
fn what_a_rank_has_said_is_of_no_use_to_others() {
    for (credentials, purpose) in kinds() {
        let caller = ClientClaim { rank: 1, world_size: 2, purpose };
        let mut said = Vec::new();
        let heard = |at: usize, bytes: &mut [u8]| {
            if at.is_multiple_of(2) {
                said.extend_from_slice(bytes)
            }
        };
        assert!(shake(&credentials, caller, heard).0.is_ok());
        let (listener, port) = point();
        for _ in 0..20 {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stream.write_all(&said).unwrap();
            assert!(matches!(
                listen(&listener, &credentials, LONG),
                Err(crate::connection::connect_error::ConnectError::BadProof)
            ));
        }
    }
}

/// Passes records on in one direction, each changed by `change`, after `plain` bytes that are not part of a record.
fn relay_records(
    mut from: TcpStream,
    mut to: TcpStream,
    plain: usize,
    mut change: impl FnMut(usize, &mut [u8]),
) {
    let mut opening = vec![0; plain];
    if from.read_exact(&mut opening).is_ok() && plain > 0 {
        change(0, &mut opening);
        let _ = to.write_all(&opening);
    }
    for number in plain.min(1).. {
        let mut record = vec![0; 5];
        if from.read_exact(&mut record).is_err() {
            break;
        }
        let body = usize::from(u16::from_be_bytes([record[3], record[4]]));
        record.resize(5 + body, 0);
        if from.read_exact(&mut record[5..]).is_err() {
            break;
        }
        change(number, &mut record);
        if to.write_all(&record).is_err() {
            break;
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

/// Runs an encrypted handshake of which one byte is changed: direction, record, byte. Returns whether each side
/// succeeded, and the lengths of the records in each direction.
fn shake_encrypted(
    credentials: &Credentials,
    time_limit: Duration,
    wrong: Option<(usize, usize, usize)>,
) -> (bool, bool, [Vec<usize>; 2]) {
    let caller = ClientClaim { rank: 1, world_size: 2, purpose: Purpose::Data };
    let ((listener, port), (between, entrance)) = (point(), point());
    let lengths = std::sync::Mutex::new([Vec::new(), Vec::new()]);
    let change = |way: usize, number: usize, record: &mut [u8]| {
        // A signature is sometimes a byte shorter.
        let len = record.len();
        lengths.lock().unwrap()[way].push(len);
        let byte = wrong.filter(|wrong| (wrong.0, wrong.1) == (way, number)).map(|wrong| wrong.2);
        if let Some(byte) = byte {
            record[byte.min(len - 1)] ^= MASKS[byte % MASKS.len()];
        }
    };
    let (server, client) = thread::scope(|scope| {
        let server = scope.spawn(|| listen(&listener, credentials, time_limit).is_ok());
        scope.spawn(|| {
            let client = between.accept().unwrap().0;
            let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            let change = &change;
            scope.spawn(move || relay_records(back.0, back.1, 0, |number, record| change(1, number, record)));
            relay_records(client, server, OPENING, |number, record| change(0, number, record));
        });
        let address = ([127, 0, 0, 1], entrance).into();
        let client =
            HandshakeStream::connect(address, credentials, caller, Instant::now() + time_limit).is_ok();
        (server.join().unwrap(), client)
    });
    (server, client, lengths.into_inner().unwrap())
}

#[test]
fn every_byte_of_an_encrypted_handshake_counts() {
    let config = TcpConfig { tls: crate::Tls::All, ..tcp(0, 2, 1) };
    let credentials = Credentials::of(&config).unwrap();
    let (server, client, lengths) = shake_encrypted(&credentials, LONG, None);
    assert!(server && client);
    let mut cases = Vec::new();
    for (way, records) in lengths.iter().enumerate() {
        for (record, &len) in records.iter().enumerate() {
            cases.extend((0..len).map(|byte| (way, record, byte)));
        }
    }
    assert!(cases.len() > 1000);
    let next = std::sync::atomic::AtomicUsize::new(0);
    let refused = || {
        let mut passed = Vec::new();
        while let Some(&case) = cases.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            // Where a length is changed, both sides wait until the time is over.
            let (server, client, _) = shake_encrypted(&credentials, Duration::from_millis(300), Some(case));
            if server && client {
                passed.push(case);
            }
        }
        passed
    };
    let passed: Vec<_> = thread::scope(|scope| {
        let threads = [0; 8].map(|_| scope.spawn(refused));
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(passed.is_empty(), "way, record and byte: {passed:?}");
}
