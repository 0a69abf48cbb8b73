//! A launcher announces that a rank has ended before it came: all other ranks name it in their error.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::death_announcement::Announcement;
use super::message::{LIMIT, ToLeader, ToMember};
use super::misfits::introduced;
use super::*;
use crate::connection::wire::HandshakeStream;

/// Announces the end of a rank, as a launcher does, until the returned stream is dropped.
fn announce(config: TcpConfig) -> (UnixStream, thread::JoinHandle<Result<()>>) {
    let leader_has_ended = Arc::new(AtomicBool::new(config.rank == 0));
    announce_with(config, leader_has_ended)
}

fn announce_with(
    config: TcpConfig,
    leader_has_ended: Arc<AtomicBool>,
) -> (UnixStream, thread::JoinHandle<Result<()>>) {
    let (alive, stop) = UnixStream::pair().unwrap();
    let announcement = Announcement {
        leader_has_ended,
        config,
        host: "there".into(),
        until: Instant::now() + LONG,
        stop: Arc::new(stop),
    };
    (alive, thread::spawn(move || announcement.make()))
}

#[test]
fn who_does_not_come_is_named_by_all_that_wait() {
    for dead in [1, 2, 3] {
        let (listener, port) = point();
        let leader = leading(tcp(0, 4, port), listener);
        let others = (1..4).filter(|rank| *rank != dead).map(|rank| joining(tcp(rank, 4, port))).collect();
        let leader_has_ended = Arc::new(AtomicBool::new(false));
        let (alive, launcher) = announce_with(tcp(dead, 4, port), leader_has_ended.clone());
        let first = leader.join().unwrap();
        // Rank 0 ends as soon as it knows: the launcher tells ranks that come later.
        leader_has_ended.store(true, Ordering::Release);
        for end in std::iter::once(first).chain(ends(others)) {
            let error = end.unwrap_err();
            assert!(matches!(error, Error::PeerDied { rank, .. } if rank == dead), "{error}");
            assert_eq!(error.to_string(), format!("rank {dead} (host there) died during rendezvous"));
        }
        drop(alive);
        launcher.join().unwrap().unwrap();
    }
}

/// Where the launcher's report is the last to arrive, it must not be taken for a rank that cannot share memory.
#[test]
fn who_does_not_come_is_named_where_memory_is_asked_for() {
    let (listener, port) = point();
    let with_memory = |rank| TcpConfig { transport: Transport::Shm, ..tcp(rank, 4, port) };
    let leader = leading(with_memory(0), listener);
    let _others = [1, 2].map(|rank| introduced(rank, 4, port));
    let (alive, launcher) = announce(with_memory(3));
    let error = leader.join().unwrap().unwrap_err();
    assert_eq!(error.to_string(), "rank 3 (host there) died during rendezvous");
    drop(alive);
    launcher.join().unwrap().unwrap();
}

#[test]
fn where_rank_0_has_ended_its_launcher_answers() {
    let (listener, port) = point();
    drop(listener);
    let ranks = (1..4).map(|rank| joining(tcp(rank, 4, port))).collect();
    let (alive, launcher) = announce(tcp(0, 4, port));
    for end in ends(ranks) {
        assert_eq!(end.unwrap_err().to_string(), "rank 0 (host there) died during rendezvous");
    }
    drop(alive);
    launcher.join().unwrap().unwrap();
    // The port is free again.
    assert!(TcpListener::bind(("127.0.0.1", port)).is_ok());
}

#[test]
fn who_has_come_or_met_is_not_disturbed() {
    let (listener, port) = point();
    let mut ranks = vec![leading(tcp(0, 3, port), listener)];
    ranks.extend((1..3).map(|rank| joining(tcp(rank, 3, port))));
    let met = meetings(ranks);
    let (alive, launcher) = announce(tcp(1, 3, port));
    check(&met);
    drop(alive);
    launcher.join().unwrap().unwrap();
}

/// A rank that comes late reports how long the others have waited, not how long it has itself.
#[test]
fn all_say_how_long_the_first_has_waited() {
    let (listener, port) = point();
    let timeout = Duration::from_secs(2);
    let leader = leading(TcpConfig { timeout, ..tcp(0, 3, port) }, listener);
    thread::sleep(Duration::from_secs(1));
    let late = joining(TcpConfig { timeout: LONG, ..tcp(1, 3, port) });
    for end in ends(vec![leader, late]) {
        let Err(Error::Rendezvous { waited, detail, .. }) = end else { panic!("{end:?}") };
        assert!(waited >= timeout && detail.contains("rank 2 is missing"), "{waited:?}: {detail}");
    }
}

/// The others have met by then: it is lost like a rank that dies later.
#[test]
fn one_that_dies_once_all_are_connected_does_not_keep_the_others_apart() {
    for _ in 0..20 {
        let (listener, port) = point();
        let leader = leading(tcp(0, 3, port), listener);
        let [mut dying, mut other] = [1, 2].map(|rank| introduced(rank, 3, port));
        let until = Instant::now() + LONG;
        let connected = HandshakeStream::frame(&ToLeader::Connected).unwrap();
        assert!(matches!(other.receive(LIMIT, until), Ok(ToMember::Table(_))));
        other.write(&connected, until).unwrap();
        // Rank 0 waits for the last byte; the rank dies with the table unread.
        let (last, rest) = connected.split_last().unwrap();
        dying.write(rest, until).unwrap();
        thread::sleep(Duration::from_millis(20));
        dying.write(&[*last], until).unwrap();
        drop(dying);
        assert!(matches!(other.receive(LIMIT, until), Ok(ToMember::Complete)));
        leader.join().unwrap().unwrap();
    }
}
