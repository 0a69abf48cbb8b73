//! The table of ranks goes down a tree: a rank that does not pass it on is named by all, in time.

use super::misfits::{hello, introduced, introduced_with};
use super::*;
use crate::Tls;
use crate::base::tree;
use crate::connection::handshake::{ClientClaim, HandshakeStatus, Purpose, Verdict};
use crate::connection::wire::HandshakeStream;
use crate::rendezvous::message::{Hello, LIMIT, ToMember};
use crate::rendezvous::table::PASSES;

/// Rank 1 passes the table to rank 9, and that one to rank 73.
const RANKS: usize = 74;

fn short(rank: usize, world_size: usize, port: u16) -> TcpConfig {
    TcpConfig { timeout: Duration::from_secs(4), ..tcp(rank, world_size, port) }
}

/// Returns the errors of all ranks but rank 1, which the test plays.
fn without_rank_1(world_size: usize, rank_1: impl FnOnce(u16)) -> Vec<Error> {
    let (listener, port) = point();
    let mut ranks = vec![leading(short(0, world_size, port), listener)];
    ranks.extend((2..world_size).map(|rank| joining(short(rank, world_size, port))));
    rank_1(port);
    ends(ranks).into_iter().map(|end| end.unwrap_err()).collect()
}

#[test]
fn ranks_of_three_levels_meet() {
    assert_eq!(tree::depth(RANKS - 1, PASSES), 3);
    for tls in [Tls::Off, Tls::All] {
        let (listener, port) = point();
        let config = |rank| TcpConfig { tls, ..tcp(rank, RANKS, port) };
        let mut ranks = vec![leading(config(0), listener)];
        ranks.extend((1..RANKS).map(|rank| joining(config(rank))));
        let meetings = meetings(ranks);
        let first = meetings[0].lines.data_connections.peers();
        assert!(meetings.iter().all(|meeting| meeting.lines.data_connections.peers() == first));
    }
}

#[test]
fn who_stops_before_it_has_the_table_is_named_by_all() {
    let (_silent, data_port) = point();
    let errors = without_rank_1(RANKS, |port| {
        let stopped = introduced_with(1, RANKS as u32, port, Hello { port: data_port, ..hello() });
        std::mem::forget(stopped);
    });
    for error in errors {
        let text = error.to_string();
        assert!(text.contains(") cannot reach rank 1 (host elsewhere)"), "{text}");
        assert!(text.ends_with("no answer came"), "{text}");
    }
}

/// Returns the errors of all ranks but rank 1, which takes the table and then sends something else to those that fetch it from it.
fn with_rank_1_sending(
    world_size: usize,
    send: impl Fn(&mut HandshakeStream, Instant) + Send + 'static,
) -> Vec<Error> {
    let (listener, data_port) = point();
    without_rank_1(world_size, |port| {
        let world_size = world_size as u32;
        let until = Instant::now() + LONG;
        let mut stopped = introduced_with(1, world_size, port, Hello { port: data_port, ..hello() });
        let ToMember::Table(table) = stopped.receive(1 << 20, until).unwrap() else { panic!("no table") };
        let credentials = Credentials::new(secret().as_ref(), "").bound_to(&table.session);
        let answers = move || {
            for stream in listener.incoming().flatten() {
                let mut wire = HandshakeStream::new(stream, None).unwrap();
                let Ok(admission) = wire.accept(&credentials, until) else { continue };
                let verdict = Verdict { status: HandshakeStatus::Admitted, rank: 1, world_size };
                wire.write(&admission.answer(verdict), until).unwrap();
                send(&mut wire, until);
                std::mem::forget(wire);
            }
        };
        thread::spawn(answers);
        std::mem::forget(stopped);
    })
}

#[test]
fn who_sends_something_else_than_the_table_is_named_by_all() {
    let errors = with_rank_1_sending(10, |wire, until| wire.send(&ToMember::Complete, until).unwrap());
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("rank 1 (host elsewhere)"), "{text}");
        assert!(text.contains("something else than the table of ranks"), "{text}");
    }
}

#[test]
fn who_stops_while_it_passes_the_table_on_is_named_by_all() {
    // Nothing more than some of the table.
    let errors = with_rank_1_sending(RANKS, |wire, until| wire.write(&[0, 1, 0, 0, b'{'], until).unwrap());
    for error in errors {
        let text = error.to_string();
        assert!(text.contains("cannot reach rank 1 (host elsewhere)"), "{text}");
    }
}

#[test]
fn who_dies_before_it_passes_the_table_on_is_named_by_all_at_once() {
    let begun = Instant::now();
    let errors = without_rank_1(RANKS, |port| {
        let (_listens, data_port) = point();
        let mut dying = introduced_with(1, RANKS as u32, port, Hello { port: data_port, ..hello() });
        assert!(matches!(dying.receive(1 << 20, Instant::now() + LONG), Ok(ToMember::Table(_))));
    });
    for error in errors {
        assert!(matches!(error, Error::PeerDied { rank: 1, .. }), "{error}");
    }
    // Long before the time-out, also where many tests run at once.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
}

#[test]
fn only_those_that_it_is_for_get_the_table() {
    let world_size = 11;
    let (listener, port) = point();
    let mut ranks = vec![leading(tcp(0, world_size, port), listener)];
    ranks.extend((1..world_size).filter(|rank| *rank != 9).map(|rank| joining(tcp(rank, world_size, port))));
    // The test plays rank 9, which gets the table from rank 1, as rank 10 does.
    let mut own = introduced(9, world_size as u32, port);
    let until = Instant::now() + LONG;
    let ToMember::TableAt(source) = own.receive(LIMIT, until).unwrap() else { panic!("another message") };
    assert_eq!(source.rank, 1);
    let job = Credentials::new(secret().as_ref(), "");
    let fetch = |rank, credentials: &Credentials| {
        let claim = ClientClaim { rank, world_size: world_size as u32, purpose: Purpose::Table };
        let (mut wire, verdict) = HandshakeStream::connect(source.address, credentials, claim, until).ok()?;
        (verdict.status == HandshakeStatus::Admitted)
            .then(|| wire.receive::<ToMember>(1 << 20, until).ok())?
    };
    let bound = job.bound_to(&source.session);
    let stranger = Credentials::new(None, "").bound_to(&source.session);
    assert!(fetch(9, &stranger).is_none() && fetch(9, &job).is_none());
    let Some(ToMember::Table(table)) = fetch(9, &bound) else { panic!("no table") };
    assert_eq!((table.ranks.len(), table.session), (world_size, source.session));
    assert!(fetch(2, &bound).is_none(), "rank 2 gets the table from rank 0");
    drop(own);
    for end in ends(ranks) {
        assert!(matches!(end, Err(Error::PeerDied { rank: 9, .. })), "{end:?}");
    }
}
