//! The parent group is aborted during a meeting: the meeting ends at once, with an error that says so.

use std::sync::mpsc::channel;

use super::misfits::introduced;
use super::*;
use crate::connection::handshake::{HandshakeStatus, Verdict};
use crate::connection::wire::HandshakeStream;
use crate::rendezvous::message::{HELLO_LIMIT, Hello, LIMIT, ToMember};
use crate::{Communicator, Tcp};

/// Returns the result of a rank whose parent is aborted as soon as its meeting is `under_way`, and the result of that
/// function.
fn aborted<T>(
    config: TcpConfig,
    listener: Option<TcpListener>,
    under_way: impl FnOnce() -> T,
) -> (Result<Meeting>, T) {
    let group = Tcp::connect(&tcp(0, 1, 1)).unwrap();
    let meets = group.register_rendezvous("rendezvous".into(), vec![]).unwrap();
    let options = Options { listener, parent: Some(group.as_parent(&meets)), ..Options::default() };
    let (end, ended) = channel();
    let rank = thread::spawn(move || end.send(meet_with(&config, options)).unwrap());
    let given = under_way();
    group.abort();
    let outcome = ended.recv_timeout(LONG / 2).unwrap();
    rank.join().unwrap();
    (outcome, given)
}

fn assert_aborted(outcome: Result<Meeting>) {
    assert!(matches!(outcome, Err(Error::Aborted { .. })), "{outcome:?}");
}

fn assert_told(wire: &mut HandshakeStream) {
    match wire.receive(LIMIT, Instant::now() + LONG).unwrap() {
        ToMember::Failed(failure) => assert!(failure.detail.contains("rank 0 (host "), "{failure:?}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn while_rank_0_waits_for_the_others() {
    let (listener, port) = point();
    let (outcome, mut other) = aborted(tcp(0, 3, port), Some(listener), || introduced(1, 3, port));
    assert_aborted(outcome);
    assert_told(&mut other);
}

#[test]
fn while_rank_0_waits_until_all_are_connected() {
    let (listener, port) = point();
    let (outcome, others) = aborted(tcp(0, 3, port), Some(listener), || {
        [1, 2].map(|rank| introduced(rank, 3, port)).map(|mut wire| {
            assert!(matches!(wire.receive(LIMIT, Instant::now() + LONG), Ok(ToMember::Table(_))));
            wire
        })
    });
    assert_aborted(outcome);
    others.into_iter().for_each(|mut wire| assert_told(&mut wire));
}

#[test]
fn while_a_rank_looks_for_rank_0() {
    // One that accepts the connection and sends nothing, and one that is not there.
    let (listener, port) = point();
    let (outcome, _) = aborted(tcp(1, 3, port), None, || listener.accept().unwrap());
    assert_aborted(outcome);
    drop(listener);
    assert_aborted(aborted(tcp(1, 3, port), None, || ()).0);
}

#[test]
fn while_a_rank_waits_for_the_table() {
    let (listener, port) = point();
    let (outcome, _) = aborted(tcp(1, 3, port), None, || {
        let until = Instant::now() + LONG;
        let credentials = Credentials::new(secret().as_ref(), "");
        let mut wire = HandshakeStream::new(listener.accept().unwrap().0, None).unwrap();
        let admission = wire.accept(&credentials, until).unwrap();
        let verdict = Verdict { status: HandshakeStatus::Admitted, rank: 0, world_size: 3 };
        wire.write(&admission.answer(verdict), until).unwrap();
        wire.receive::<Hello>(HELLO_LIMIT, until).unwrap();
        wire
    });
    assert_aborted(outcome);
}
