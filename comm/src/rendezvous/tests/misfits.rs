//! Ranks of the job that cannot form a group: each side reports why.

use std::time::Instant;

use super::*;
use crate::connection::handshake::{ClientClaim, HandshakeStatus, Purpose};
use crate::connection::wire::HandshakeStream;
use crate::rendezvous::machine::BuildInfo;
use crate::rendezvous::message::{Failure, Hello, LIMIT, ToLeader, ToMember};
use crate::transport::site::Site;

fn short(config: TcpConfig) -> TcpConfig {
    TcpConfig { timeout: Duration::from_secs(2), ..config }
}

fn text(end: &Result<Meeting>) -> String {
    end.as_ref().unwrap_err().to_string()
}

/// Connects as a rank, up to the handshake, without an introduction.
fn admitted(rank: u32, world_size: u32, port: u16) -> HandshakeStream {
    let until = Instant::now() + LONG;
    let caller = ClientClaim { rank, world_size, purpose: Purpose::Control };
    let credentials = Credentials::new(secret().as_ref(), "");
    let (wire, verdict) = loop {
        match HandshakeStream::connect(([127, 0, 0, 1], port).into(), &credentials, caller, until) {
            Ok(connected) => break connected,
            Err(_) => assert!(Instant::now() < until),
        }
    };
    assert_eq!(verdict.status, HandshakeStatus::Admitted);
    wire
}

/// Connects as a rank, and introduces itself.
pub(super) fn introduced(rank: u32, world_size: u32, port: u16) -> HandshakeStream {
    introduced_for(rank, world_size, port, LONG)
}

/// The same for a rank that claims to wait this long.
pub(super) fn introduced_for(rank: u32, world_size: u32, port: u16, time_limit: Duration) -> HandshakeStream {
    let hello = Hello { timeout_ms: time_limit.as_millis() as u64, ..hello() };
    introduced_with(rank, world_size, port, hello)
}

/// Introduction of a rank whose port nobody listens on.
pub(super) fn hello() -> Hello {
    Hello {
        ip: None,
        port: point().1,
        host: "elsewhere".into(),
        pid: 77,
        site: Site::own(Some(Obstacle::Unwanted)),
        timeout_ms: LONG.as_millis() as u64,
        regroup_port: 0,
        machine: BuildInfo::own(),
    }
}

/// Introduction of a rank with an older program.
fn old() -> Hello {
    Hello { machine: BuildInfo::of_version("9.8.7"), ..hello() }
}

pub(super) fn introduced_with(rank: u32, world_size: u32, port: u16, hello: Hello) -> HandshakeStream {
    let mut wire = admitted(rank, world_size, port);
    wire.send(&hello, Instant::now() + LONG).unwrap();
    wire
}

/// Rank 0 goes on with other ranks while the rest of an introduction is to come.
#[test]
fn an_introduction_may_come_in_parts() {
    let (listener, port) = point();
    let first = leading(tcp(0, 4, port), listener);
    let frame = HandshakeStream::frame(&hello()).unwrap();
    let mut wires: Vec<HandshakeStream> = Vec::new();
    for (rank, part) in [(1, 2), (2, 40)] {
        let mut wire = admitted(rank, 4, port);
        wire.write(&frame[..part], Instant::now() + LONG).unwrap();
        wires.push(wire);
    }
    let mut third = introduced(3, 4, port);
    for (wire, part) in wires.iter_mut().zip([2, 40]) {
        wire.write(&frame[part..], Instant::now() + LONG).unwrap();
    }
    for wire in wires.iter_mut().chain([&mut third]) {
        let answer = wire.receive(64 * LIMIT, Instant::now() + LONG);
        assert!(matches!(answer, Ok(ToMember::Table(_))), "{answer:?}");
    }
    drop((wires, third));
    assert!(first.join().unwrap().is_err());
}

/// It is told so while its introduction is to come.
#[test]
fn one_that_has_not_introduced_itself_hears_that_there_is_no_group() {
    let (listener, port) = point();
    let first = leading(tcp(0, 4, port), listener);
    let mut silent = admitted(1, 4, port);
    let mut begun = admitted(2, 4, port);
    begun.write(&[1], Instant::now() + LONG).unwrap();
    drop(introduced(3, 4, port));
    for wire in [&mut silent, &mut begun] {
        let answer = wire.receive(LIMIT, Instant::now() + LONG);
        assert!(matches!(answer, Ok(ToMember::Failed(_))), "{answer:?}");
    }
    assert!(matches!(first.join().unwrap(), Err(Error::PeerDied { rank: 3, .. })));
}

#[test]
fn a_group_is_as_large_as_rank_0_can_have_connections() {
    assert!(check_files(0, 1 << 20, None).is_ok() && check_files(0, 60, Some(20)).is_ok());
    assert!(check_files(0, 960, Some(1024)).is_ok());
    let message = check_files(0, 961, Some(1024)).unwrap_err().to_string();
    let told =
        "and may have only 1024 files open: give at most 960 ranks, or raise the limit there (ulimit -n)";
    assert!(message.starts_with("world size: got 961; ") && message.ends_with(told), "{message}");
}

#[test]
fn a_missing_rank_is_named_on_all() {
    let (listener, port) = point();
    let ranks = vec![leading(short(tcp(0, 4, port)), listener), joining(short(tcp(2, 4, port)))];
    for (rank, end) in [0, 2].into_iter().zip(ends(ranks)) {
        let message = text(&end);
        assert!(matches!(end, Err(Error::Rendezvous { .. })), "{message}");
        assert!(
            message.starts_with(&format!("rank {rank}: the group of 4 did not meet at 127.0.0.1:{port}")),
            "{message}"
        );
        assert!(message.contains("ranks 1 and 3 are missing"), "{message}");
    }
}

#[test]
fn the_first_who_cannot_wait_any_longer_ends_the_meeting_for_all() {
    let (listener, port) = point();
    let started = Instant::now();
    let leader = leading(tcp(0, 4, port), listener);
    // Connected by hand, so that they read messages however late: they claim to wait this long, and wait longer.
    let mut others = [(1, LONG), (3, Duration::from_millis(100))]
        .map(|(rank, time_limit)| introduced_for(rank, 4, port, time_limit));
    for wire in &mut others {
        match wire.receive(LIMIT, Instant::now() + LONG).unwrap() {
            ToMember::Failed(failure) => assert!(failure.detail.contains("rank 2 is missing"), "{failure:?}"),
            other => panic!("{other:?}"),
        }
    }
    let end = leader.join().unwrap();
    assert!(text(&end).contains("rank 2 is missing"), "{}", text(&end));
    assert!(started.elapsed() < LONG / 2);
}

#[test]
fn a_missing_rank_0_is_said_to_be_missing() {
    let (listener, port) = point();
    drop(listener);
    let message = text(&meet(&short(tcp(1, 2, port))));
    assert!(message.contains("rank 0 was not found there") && message.contains("refused"), "{message}");

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let message = text(&meet(&short(file(1, 2, &path))));
    assert!(
        message.contains("rank 0 has not written the file yet") && message.contains("meeting"),
        "{message}"
    );
    let message = text(&meet(&short(file(0, 2, &path))));
    assert!(message.contains("rank 1 is missing") && !path.exists(), "{message}");

    let nowhere = TcpConfig { init_method: "tcp://host.invalid:80".parse().unwrap(), ..short(tcp(1, 2, 1)) };
    let message = text(&meet(&nowhere));
    assert!(message.contains("the name host.invalid has no address"), "{message}");
    let nowhere = TcpConfig { rank: 0, ..nowhere };
    assert!(matches!(meet(&nowhere), Err(Error::InvalidArgument { .. })));
}

#[test]
fn a_rank_of_another_version_is_refused_and_the_group_goes_on() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 2, port), listener);
    let mut other = introduced_with(1, 2, port, old());
    let own = format!("version {} (", env!("CARGO_PKG_VERSION"));
    match other.receive(LIMIT, Instant::now() + LONG).unwrap() {
        ToMember::Refused(reason) => {
            assert!(reason.starts_with("rank 1 (host elsewhere) runs version 9.8.7 ("), "{reason}");
            assert!(reason.contains("rank 0 (host ") && reason.contains(&own), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    check(&meetings(vec![leader, joining(tcp(1, 2, port))]));

    // Rank 0 reports it too, where no other rank comes.
    let (listener, port) = point();
    let leader = leading(short(tcp(0, 2, port)), listener);
    drop(introduced_with(1, 2, port, old()));
    let message = text(&leader.join().unwrap());
    assert!(
        message.contains("rank 1 is missing; refused: rank 1 (host elsewhere) runs version 9.8.7"),
        "{message}"
    );
}

#[test]
fn a_second_rank_of_the_same_number_is_refused_and_the_group_goes_on() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    // Connections are served at the same time, in any order: one of two is here for certain once the other is refused.
    let first = [introduced(2, 3, port), introduced(2, 3, port)];
    while !first.iter().any(HandshakeStream::is_readable) {
        thread::sleep(Duration::from_millis(1));
    }
    let message = text(&meet(&tcp(2, 3, port)));
    assert!(message.contains("rank 2 is already here, from host elsewhere, pid 77"), "{message}");
    drop(first);
    assert!(matches!(leader.join().unwrap(), Err(Error::PeerDied { rank: 2, .. })));

    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    let (end, ended) = std::sync::mpsc::channel();
    for _ in 0..2 {
        let end = end.clone();
        thread::spawn(move || end.send(meet(&tcp(1, 3, port))).unwrap());
    }
    let refused = ended.recv().unwrap();
    assert!(matches!(refused, Err(Error::Refused { rank: 1, .. })), "{refused:?}");
    let last = meet(&tcp(2, 3, port)).unwrap();
    check(&[leader.join().unwrap().unwrap(), ended.recv().unwrap().unwrap(), last]);
}

#[test]
fn a_rank_with_another_world_size_is_told_both() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 2, port), listener);
    let end = meet(&tcp(1, 3, port));
    assert!(matches!(end, Err(Error::Refused { rank: 1, .. })));
    assert!(text(&end).contains("world size 3") && text(&end).contains("has 2"), "{}", text(&end));
    let other = meet(&tcp(1, 2, port)).unwrap();
    check(&[leader.join().unwrap().unwrap(), other]);
}

#[test]
fn rank_0_remembers_whom_it_refused() {
    let (listener, port) = point();
    let leader = leading(short(tcp(0, 2, port)), listener);
    assert!(meet(&tcp(1, 3, port)).is_err());
    let message = text(&leader.join().unwrap());
    assert!(message.contains("rank 1 is missing; refused: rank 1 came with world size 3"), "{message}");
}

#[test]
fn a_rank_with_another_secret_or_job_learns_it_long_before_the_time_out() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 2, port), listener);
    let other = Some(Secret::random().unwrap());
    for wrong in [
        TcpConfig { secret: other, ..tcp(1, 2, port) },
        TcpConfig { secret: None, ..tcp(1, 2, port) },
        TcpConfig { job_id: "another".into(), ..tcp(1, 2, port) },
    ] {
        let started = Instant::now();
        let message = text(&meet(&wrong));
        assert!(message.contains("GIRANDOLE_SECRET") && message.contains("GIRANDOLE_JOB_ID"), "{message}");
        assert!(started.elapsed() < LONG / 2);
    }
    let other = meet(&tcp(1, 2, port)).unwrap();
    check(&[leader.join().unwrap().unwrap(), other]);
}

#[test]
fn off_loopback_nothing_opens_without_a_secret() {
    let open = |rank| TcpConfig { secret: None, ..tcp(rank, 2, 1) };
    for rank in [0, 1] {
        let bound = TcpConfig { bind: "0.0.0.0".parse().unwrap(), ..open(rank) };
        let away = TcpConfig { init_method: "tcp://192.0.2.1:80".parse().unwrap(), ..open(rank) };
        let mapped = TcpConfig { init_method: "tcp://[::ffff:192.0.2.1]:80".parse().unwrap(), ..open(rank) };
        for config in [bound, away, mapped] {
            assert!(matches!(meet(&config), Err(Error::NoSecret { .. })), "{config:?}");
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let file = TcpConfig { secret: None, bind: "192.0.2.1".parse().unwrap(), ..file(0, 2, &path) };
    assert!(matches!(meet(&file), Err(Error::NoSecret { .. })) && !path.exists());
}

#[test]
fn a_port_in_use_or_a_path_that_cannot_be_written_is_an_error_at_once() {
    let (_holder, port) = point();
    let end = meet(&tcp(0, 2, port));
    assert!(matches!(end, Err(Error::Listen { .. })) && text(&end).contains(&port.to_string()));
    let end = meet(&file(0, 2, Path::new("/nowhere/at/all")));
    assert!(matches!(end, Err(Error::InvalidArgument { .. })) && text(&end).contains("/nowhere/at/all"));
    let everywhere =
        TcpConfig { bind: "0.0.0.0".parse().unwrap(), ..file(0, 2, Path::new("/nowhere/at/all")) };
    assert!(text(&meet(&everywhere)).contains("GIRANDOLE_BIND"));
}

#[test]
fn the_death_of_a_rank_that_waits_is_told_to_all_at_once() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 4, port), listener);
    let mut waiting = introduced(1, 4, port);
    drop(introduced(2, 4, port));
    let end = leader.join().unwrap();
    let Err(Error::PeerDied { rank: 2, host, .. }) = end else { panic!("{end:?}") };
    assert_eq!(host, "elsewhere");
    let told = waiting.receive(LIMIT, Instant::now() + LONG);
    let Ok(ToMember::Failed(failure)) = told else { panic!("{told:?}") };
    assert_eq!(failure.died, Some((2, host)));
}

/// Rank 0 has given up before the rank has introduced itself.
#[test]
fn who_is_about_to_introduce_itself_is_told_too() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 4, port), listener);
    let mut coming = admitted(1, 4, port);
    drop(introduced(2, 4, port));
    let told = coming.receive(LIMIT, Instant::now() + LONG);
    let Ok(ToMember::Failed(failure)) = told else { panic!("{told:?}") };
    assert_eq!(failure.died, Some((2, "elsewhere".into())));
    assert!(matches!(leader.join().unwrap(), Err(Error::PeerDied { rank: 2, .. })));
}

#[test]
fn the_death_of_rank_0_is_noticed_at_once() {
    let (listener, port) = point();
    let other = joining(tcp(1, 3, port));
    let until = Instant::now() + LONG;
    let mut wire = HandshakeStream::new(listener.accept().unwrap().0, None).unwrap();
    let credentials = Credentials::new(secret().as_ref(), "");
    let admission = wire.accept(&credentials, until).unwrap();
    let verdict =
        crate::connection::handshake::Verdict { status: HandshakeStatus::Admitted, rank: 0, world_size: 3 };
    wire.write(&admission.answer(verdict), until).unwrap();
    let hello: Hello = wire.receive(LIMIT, until).unwrap();
    assert_eq!(hello.pid, std::process::id());
    drop(wire);
    assert!(matches!(other.join().unwrap(), Err(Error::PeerDied { rank: 0, .. })));
}

#[test]
fn a_rank_that_cannot_be_reached_is_an_error_on_all() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    // Nobody listens at the address that it reports.
    let mut deaf = introduced(1, 3, port);
    let other = joining(tcp(2, 3, port));
    for end in ends(vec![leader, other]) {
        let message = text(&end);
        assert!(
            message.contains("rank 2 (host ") && message.contains("cannot reach rank 1 (host elsewhere)"),
            "{message}"
        );
    }
    let until = Instant::now() + LONG;
    assert!(matches!(deaf.receive(LIMIT, until), Ok(ToMember::Table(_))));
    assert!(matches!(deaf.receive(LIMIT, until), Ok(ToMember::Failed(_))));
}

#[test]
fn a_rank_that_gives_up_is_named_on_all() {
    let until = Instant::now() + LONG;
    let given_up =
        || ToLeader::Failed(Failure { detail: "it has no more memory".into(), died: None, waited_ms: 0 });
    let told = "rank 1 (host elsewhere) gave up: it has no more memory";
    for world_size in [4, 3] {
        let (listener, port) = point();
        let leader = leading(tcp(0, world_size, port), listener);
        let mut others = [1, 2].map(|rank| introduced(rank, world_size as u32, port));
        // In the larger group a rank is missing; in the other one all connect already.
        if world_size == 3 {
            for wire in &mut others {
                assert!(matches!(wire.receive(LIMIT, until), Ok(ToMember::Table(_))));
            }
        }
        others[0].send(&given_up(), until).unwrap();
        let Ok(ToMember::Failed(failure)) = others[1].receive(LIMIT, until) else { panic!("no failure") };
        assert_eq!(failure.detail, told);
        let message = text(&leader.join().unwrap());
        assert!(message.contains(told), "{message}");
    }
}

#[test]
fn a_rank_that_dies_while_all_connect_is_named_on_all() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    let mut dying = introduced(1, 3, port);
    let other = joining(tcp(2, 3, port));
    assert!(matches!(dying.receive(LIMIT, Instant::now() + LONG), Ok(ToMember::Table(_))));
    drop(dying);
    for end in ends(vec![leader, other]) {
        assert!(matches!(end, Err(Error::PeerDied { rank: 1, .. })), "{end:?}");
    }
}

#[test]
fn a_rank_that_talks_out_of_turn_is_an_error() {
    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    introduced(1, 3, port).send(&ToLeader::Connected, Instant::now() + LONG).unwrap();
    assert!(matches!(leader.join().unwrap(), Err(Error::Protocol { rank: 1, .. })));

    let (listener, port) = point();
    let leader = leading(tcp(0, 3, port), listener);
    introduced(1, 3, port).write(&[0xff; 100], Instant::now() + LONG).unwrap();
    assert!(matches!(leader.join().unwrap(), Err(Error::Protocol { rank: 1, .. })));
}
