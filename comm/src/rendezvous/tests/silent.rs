//! A rank stops responding during rendezvous, like a stopped process: its connections stay open.

use super::misfits::{hello, introduced, introduced_for, introduced_with};
use super::*;
use crate::connection::handshake::{HandshakeStatus, Verdict};
use crate::connection::obstacle::Obstacle;
use crate::connection::wire::HandshakeStream;
use crate::rendezvous::message::{Entry, HELLO_LIMIT, Hello, LIMIT, Table, ToLeader, ToMember};
use crate::transport::site::Site;

/// Returns the error of rank 1 of three, when rank 0 has accepted it, sends what `what` sends, and then nothing more.
fn joined(what: fn(&mut HandshakeStream, &Hello)) -> String {
    let (listener, port) = point();
    let joined = joining(TcpConfig { timeout: Duration::from_secs(1), ..tcp(1, 3, port) });
    let until = Instant::now() + LONG;
    let credentials = Credentials::new(secret().as_ref(), "");
    let mut wire = HandshakeStream::new(listener.accept().unwrap().0, None).unwrap();
    let admission = wire.accept(&credentials, until).unwrap();
    wire.write(
        &admission.answer(Verdict { status: HandshakeStatus::Admitted, rank: 0, world_size: 3 }),
        until,
    )
    .unwrap();
    let hello: Hello = wire.receive(HELLO_LIMIT, until).unwrap();
    what(&mut wire, &hello);
    let error = joined.join().unwrap().unwrap_err();
    assert!(matches!(error, Error::Timeout { rank: 0, .. }), "{error}");
    // It reports the error to rank 0, in case that still listens.
    loop {
        match wire.receive(LIMIT, until).unwrap() {
            ToLeader::Connected => {}
            ToLeader::Failed(failure) => break assert_eq!(failure.detail, error.to_string()),
        }
    }
    error.to_string()
}

fn assert_names_rank_0(text: &str) {
    let (begin, end) =
        ("rank 0 (host 127.0.0.1) did not take part in rendezvous within ", "a longer time-out");
    assert!(text.starts_with(begin) && text.contains(end), "{text}");
    assert!(text.contains("it had come, and says nothing any more; "), "{text}");
}

#[test]
fn rank_0_before_all_are_here() {
    assert_names_rank_0(&joined(|_, _| ()));
}

/// Rank 1 must then connect to rank 0, whose system accepts the connection.
#[test]
fn rank_0_when_all_are_here() {
    let text = joined(|wire, hello| {
        let (silent, port) = point();
        let site = || Site::own(Some(Obstacle::Unwanted));
        let entry = |port| Entry {
            address: ([127, 0, 0, 1], port).into(),
            host: "here".into(),
            pid: 1,
            site: site(),
            regroup_port: 0,
        };
        let timeout_ms = u64::MAX;
        let table =
            Table { session: [7; 32], timeout_ms, ranks: vec![entry(port), entry(hello.port), entry(port)] };
        wire.send(&ToMember::Table(table), Instant::now() + LONG).unwrap();
        // The listener stays open as long as the rank tries.
        std::mem::forget(silent);
    });
    assert_names_rank_0(&text);
}

/// Rank 0 waits no longer than the ranks that wait for its answer: it tells them which rank is missing.
#[test]
fn another_rank_when_all_are_here() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    let mut first = introduced(1, 3, port);
    let mut other = introduced_for(2, 3, port, Duration::from_millis(500));
    let until = Instant::now() + LONG / 2;
    for wire in [&mut first, &mut other] {
        assert!(matches!(wire.receive(LIMIT, until), Ok(ToMember::Table(_))));
    }
    other.send(&ToLeader::Connected, until).unwrap();
    for wire in [&mut first, &mut other] {
        match wire.receive(LIMIT, until).unwrap() {
            ToMember::Failed(failure) => {
                assert_eq!(failure.detail, "all ranks are here, but nothing is heard of rank 1 any more");
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(matches!(leader.join().unwrap(), Err(Error::Rendezvous { rank: 0, .. })));
}

/// A rank that has registered, and may have reported that it is connected, does not answer the rank after it, whose
/// connection its system accepts: that rank, which is well, reports it before rank 0 has waited long enough.
#[test]
fn a_neighbour_when_all_are_here() {
    for connected in [false, true] {
        let (listener, port) = point();
        let leader = leading(tcp(0, 3, port), listener);
        let (_silent, own_port) = point();
        let mut stopped = introduced_with(1, 3, port, Hello { port: own_port, ..hello() });
        let other = joining(TcpConfig { timeout: Duration::from_secs(2), ..tcp(2, 3, port) });
        if connected {
            assert!(matches!(stopped.receive(LIMIT, Instant::now() + LONG), Ok(ToMember::Table(_))));
            stopped.send(&ToLeader::Connected, Instant::now() + LONG).unwrap();
        }
        for end in [leader, other] {
            let error = end.join().unwrap().unwrap_err().to_string();
            assert!(
                error.contains(") cannot reach rank 1 (host ") && error.ends_with(": no answer came"),
                "{error}"
            );
            assert!(!error.contains("nothing is heard"), "{error}");
        }
    }
}
