//! TLS tests: two ends of a connection, and an attacker between them who reads or changes what is sent.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, poll};
use socket2::SockRef;

use super::*;
use crate::Secret;

fn secret(digit: &str) -> Secret {
    Secret::from_hex(&digit.repeat(64)).unwrap()
}

fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let both = [one, listener.accept().unwrap().0];
    both.iter().for_each(|socket| socket.set_nonblocking(true).unwrap());
    both
}

fn wait(socket: &TcpStream, flags: PollFlags) {
    poll(&mut [PollFd::new(socket, flags)], None).unwrap();
}

/// Completes a TLS handshake.
fn shaken(mut session: Session, socket: &TcpStream) -> std::io::Result<Session> {
    loop {
        match session.handshake(socket) {
            Ok(()) => return Ok(session),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                wait(socket, if session.has_outgoing() { PollFlags::OUT } else { PollFlags::IN });
            }
            Err(error) => return Err(error),
        }
    }
}

/// Returns the result of the client, then that of the server.
fn shake(client: &Identity, server: &Identity, sockets: &[TcpStream; 2]) -> [std::io::Result<Session>; 2] {
    thread::scope(|scope| {
        let server = scope.spawn(|| shaken(Session::new(server.server().unwrap()), &sockets[1]));
        let client = shaken(Session::new(client.client().unwrap()), &sockets[0]);
        if client.is_err() {
            let _ = sockets[0].shutdown(Shutdown::Write);
        }
        [client, server.join().unwrap()]
    })
}

fn sessions(sockets: &[TcpStream; 2]) -> [Session; 2] {
    let identity = Identity::new(&secret("a"), "job").unwrap();
    shake(&identity, &identity, sockets).map(|session| session.unwrap())
}

/// Sends all of `bytes`, with heads of `head` bytes, offering again what was not accepted.
fn send(session: &mut Session, socket: &TcpStream, bytes: &[u8], head: usize) {
    let mut rest = bytes;
    while !rest.is_empty() {
        let (first, second) = rest.split_at(head.min(rest.len()));
        match session.send(socket, first, second) {
            Ok(sent) => rest = &rest[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(socket, PollFlags::OUT),
            Err(error) => panic!("{error}"),
        }
    }
}

fn receive(session: &mut Session, socket: &TcpStream, len: usize, piece: usize) -> Vec<u8> {
    let (mut bytes, mut got) = (vec![0; len], 0);
    while got < len {
        let end = (got + piece).min(len);
        match session.recv(socket, &mut bytes[got..end]) {
            Ok(0) => panic!("ended after {got} bytes"),
            Ok(more) => got += more,
            Err(error) if error.kind() == ErrorKind::WouldBlock => wait(socket, PollFlags::IN),
            Err(error) => panic!("{error}"),
        }
    }
    bytes
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at.wrapping_mul(31) ^ (at >> 8)) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Through a small send buffer, in both directions at the same time.
    #[test]
    fn all_arrives_in_order(len in 1usize..300_000, head in 0usize..100, piece in 1usize..70_000) {
        let sockets = sockets();
        sockets.iter().for_each(|socket| SockRef::from(socket).set_send_buffer_size(4096).unwrap());
        let [mut client, mut server] = sessions(&sockets);
        let bytes = pattern(len);
        thread::scope(|scope| {
            scope.spawn(|| {
                send(&mut client, &sockets[0], &bytes, head);
                assert_eq!(receive(&mut client, &sockets[0], len, piece), bytes);
            });
            assert_eq!(receive(&mut server, &sockets[1], len, piece), bytes);
            send(&mut server, &sockets[1], &bytes, head);
        });
    }
}

#[test]
fn words_come_after_what_was_sent() {
    let sockets = sockets();
    let [mut client, mut server] = sessions(&sockets);
    send(&mut client, &sockets[0], b"data", 2);
    client.try_send(&sockets[0], b"farewell").unwrap();
    assert_eq!(receive(&mut server, &sockets[1], 12, 12), b"datafarewell");
    sockets[0].shutdown(Shutdown::Both).unwrap();
    wait(&sockets[1], PollFlags::IN);
    assert_eq!(server.recv(&sockets[1], &mut [0]).unwrap(), 0);
}

#[test]
fn another_secret_or_job_is_refused_by_the_client_and_heard_by_the_server() {
    let right = Identity::new(&secret("a"), "job").unwrap();
    for (digit, job) in [("b", "job"), ("a", "jab"), ("a", "")] {
        let wrong = Identity::new(&secret(digit), job).unwrap();
        let sockets = sockets();
        let faults = shake(&wrong, &right, &sockets)
            .map(|outcome| crate::connection::connect_error::ConnectError::from(outcome.unwrap_err()));
        assert!(
            matches!(faults[0], crate::connection::connect_error::ConnectError::ProofRefused),
            "{faults:?}"
        );
        assert!(
            matches!(faults[1], crate::connection::connect_error::ConnectError::ProofRefused),
            "{faults:?}"
        );
    }
}

/// Nothing that is sent can be read in transit.
#[test]
fn nobody_between_reads_it() {
    let sockets = sockets();
    let [mut client, _server] = sessions(&sockets);
    let bytes = b"a secret that is long enough to be found".repeat(100);
    send(&mut client, &sockets[0], &bytes, 5);
    let mut seen = vec![0; bytes.len()];
    sockets[1].set_nonblocking(false).unwrap();
    (&sockets[1]).read_exact(&mut seen).unwrap();
    assert!(!seen.windows(8).any(|window| window == &bytes[..8]));
}

/// Nothing of a record arrives, whichever of its bytes is changed.
#[test]
fn every_change_on_the_way_is_noticed() {
    let mut record = [0; 5 + 16 + 1 + 16];
    for byte in 0..record.len() {
        let outer = self::sockets();
        let [mut sender, mut receiver] = sessions(&outer);
        // The record of this connection, changed in transit.
        let between = self::sockets();
        send(&mut sender, &outer[0], b"sixteen bytes ..", 0);
        outer[1].set_nonblocking(false).unwrap();
        (&outer[1]).read_exact(&mut record).unwrap();
        record[byte] ^= 1;
        (&between[0]).write_all(&record).unwrap();
        between[0].shutdown(Shutdown::Write).unwrap();
        wait(&between[1], PollFlags::IN);
        let mut got = [0; 16];
        match receiver.recv(&between[1], &mut got) {
            Ok(len) => panic!("byte {byte}: {len} bytes"),
            Err(error) => assert_ne!(error.kind(), ErrorKind::WouldBlock, "byte {byte}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Invalid bytes end the handshake; they neither panic nor make it wait for gigabytes.
    #[test]
    fn rubbish_is_turned_away(mut bytes in proptest::collection::vec(any::<u8>(), 0..2000), hello: bool) {
        if let (true, Some(first)) = (hello, bytes.first_mut()) {
            *first = HELLO;
        }
        let sockets = sockets();
        (&sockets[0]).write_all(&bytes).unwrap();
        sockets[0].shutdown(Shutdown::Write).unwrap();
        let identity = Identity::new(&secret("a"), "").unwrap();
        prop_assert!(shaken(Session::new(identity.server().unwrap()), &sockets[1]).is_err());
    }
}
