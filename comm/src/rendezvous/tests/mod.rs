//! Rendezvous tests with ranks as threads: those that meet, those that fail to, and those that must not.

mod aborted;
mod corrupted;
mod ended;
mod exhausted;
mod misfits;
mod silent;
mod strangers;
mod tls;
mod tree;
mod turns;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::*;
use crate::Secret;
use crate::transport::links::Wait;

/// Long enough for a busy machine; a test that comes near it fails.
const LONG: Duration = Duration::from_secs(60);

fn secret() -> Option<Secret> {
    Some(Secret::from_hex(&"5e".repeat(32)).unwrap())
}

fn point() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn tcp(rank: usize, world_size: usize, port: u16) -> TcpConfig {
    let init_method = InitMethod::Tcp { host: "127.0.0.1".into(), port };
    TcpConfig { rank, world_size, init_method, timeout: LONG, secret: secret(), ..TcpConfig::default() }
}

fn file(rank: usize, world_size: usize, path: &Path) -> TcpConfig {
    TcpConfig { init_method: InitMethod::File(path.into()), ..tcp(rank, world_size, 1) }
}

fn leading(config: TcpConfig, listener: TcpListener) -> thread::JoinHandle<Result<Meeting>> {
    let options = Options { listener: Some(listener), ..Options::default() };
    thread::spawn(move || meet_with(&config, options))
}

fn joining(config: TcpConfig) -> thread::JoinHandle<Result<Meeting>> {
    thread::spawn(move || meet(&config))
}

fn ends(ranks: Vec<thread::JoinHandle<Result<Meeting>>>) -> Vec<Result<Meeting>> {
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn meetings(ranks: Vec<thread::JoinHandle<Result<Meeting>>>) -> Vec<Meeting> {
    ends(ranks).into_iter().map(|end| end.unwrap()).collect()
}

/// Sends rank numbers over each connection and checks them on the other end. For that, all data connections are made at
/// once, from both sides.
fn check(meetings: &[Meeting]) {
    let world_size = meetings.len();
    for (own, Meeting { lines, control, own_ips, .. }) in meetings.iter().enumerate() {
        let peers = lines.data_connections.peers();
        let me = OwnInfo::new(Transport::Tcp);
        assert!(peers.iter().all(|peer| peer.host == me.host && peer.pid == me.pid));
        assert_eq!((peers.len(), own_ips.len()), (world_size, world_size));
        for (to, socket) in control.iter().enumerate() {
            assert_eq!(socket.is_some(), own != to && (own == 0 || to == 0), "control from {own} to {to}");
            socket.iter().for_each(|socket| tell(socket, b'c', own, to));
        }
    }
    for (own, Meeting { control, .. }) in meetings.iter().enumerate() {
        let sockets = control.iter().enumerate().filter_map(|(from, socket)| Some((from, socket.as_ref()?)));
        sockets.for_each(|(from, socket)| hear(socket, b'c', own, from));
    }
    thread::scope(|scope| {
        for (own, meeting) in meetings.iter().enumerate() {
            scope.spawn(move || {
                let waits = |to| Wait { peer: to, read: true, write: false };
                for to in (0..world_size).filter(|to| *to != own) {
                    let stream = loop {
                        match meeting.lines.data_connections.take_or_request(to).unwrap() {
                            Some((stream, _)) => break stream,
                            None => meeting.lines.data_connections.wait(&[waits(to)], LONG),
                        }
                    };
                    tell(&stream, b'd', own, to);
                    hear(&stream, b'd', own, to);
                }
            });
        }
    });
}

fn number(rank: usize) -> u8 {
    u8::try_from(rank).unwrap()
}

fn tell(stream: &Stream, kind: u8, own: usize, to: usize) {
    assert!(stream.socket().nodelay().unwrap());
    assert_eq!(stream.send(&[kind, number(own)], &[number(to)]).unwrap(), 3);
}

fn hear(stream: &Stream, kind: u8, own: usize, from: usize) {
    let mut message = [0; 3];
    stream.fill(&mut message);
    assert_eq!(message, [kind, number(from), number(own)]);
}

#[test]
fn a_rank_is_connected_to_its_neighbours_at_first() {
    let (listener, port) = point();
    let mut ranks = vec![leading(tcp(0, 4, port), listener)];
    ranks.extend((1..4).map(|rank| joining(tcp(rank, 4, port))));
    let meetings = meetings(ranks);
    let connected =
        || -> Vec<_> { meetings.iter().map(|meeting| meeting.lines.data_connections.connected()).collect() };
    // The rank that was dialed may record the connection a moment after the one that dialed.
    let begun = Instant::now();
    while connected() != [vec![1], vec![0, 2], vec![1, 3], vec![2]] {
        assert!(begun.elapsed() < LONG, "{:?}", connected());
        thread::sleep(Duration::from_millis(1));
    }
    check(&meetings);
}

#[test]
fn one_rank_needs_nobody() {
    let config = TcpConfig { init_method: "tcp://host.invalid:1".parse().unwrap(), ..tcp(0, 1, 1) };
    check(&[meet(&config).unwrap()]);
}

#[test]
fn ranks_meet_at_an_address() {
    for world_size in 2..=5 {
        let (listener, port) = point();
        let others = (1..world_size).map(|rank| joining(tcp(rank, world_size, port)));
        let mut ranks: Vec<_> = others.collect();
        ranks.insert(0, leading(tcp(0, world_size, port), listener));
        check(&meetings(ranks));
    }
}

#[test]
fn without_a_secret_ranks_meet_on_loopback() {
    let (listener, port) = point();
    let open = |rank| TcpConfig { secret: None, ..tcp(rank, 3, port) };
    check(&meetings(vec![leading(open(0), listener), joining(open(1)), joining(open(2))]));
}

#[test]
fn ranks_meet_on_ipv6() {
    let Ok(listener) = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) else { return };
    let port = listener.local_addr().unwrap().port();
    let config = |rank| TcpConfig {
        init_method: format!("tcp://[::1]:{port}").parse().unwrap(),
        bind: Ipv6Addr::LOCALHOST.into(),
        ..tcp(rank, 3, port)
    };
    check(&meetings(vec![leading(config(0), listener), joining(config(1)), joining(config(2))]));
}

#[test]
fn ranks_that_listen_everywhere_find_each_other() {
    let (listener, port) = point();
    let config = |rank| TcpConfig { bind: "0.0.0.0".parse().unwrap(), ..tcp(rank, 3, port) };
    check(&meetings(vec![leading(config(0), listener), joining(config(1)), joining(config(2))]));
}

#[test]
fn many_ranks_take_turns_where_few_are_let_in_at_once() {
    let (listener, port) = point();
    let options = |listener| Options {
        listener,
        limits: Limits { at_once: 2, ..Limits::default() },
        ..Options::default()
    };
    let leader = options(Some(listener));
    let mut ranks = vec![thread::spawn(move || meet_with(&tcp(0, 16, port), leader))];
    ranks.extend((1..16).map(|rank| thread::spawn(move || meet_with(&tcp(rank, 16, port), options(None)))));
    check(&meetings(ranks));
}

#[test]
fn a_group_can_meet_again_at_the_same_port() {
    // The port is free between the two meetings, and another test may take it: then the next port is tried.
    let met_again = (0..10).any(|_| {
        let (listener, port) = point();
        check(&meetings(vec![leading(tcp(0, 2, port), listener), joining(tcp(1, 2, port))]));
        let short = TcpConfig { timeout: Duration::from_secs(5), ..tcp(1, 2, port) };
        let mut ends = ends(vec![joining(tcp(0, 2, port)), joining(short)]);
        match (ends.remove(0), ends.remove(0)) {
            (Ok(leader), Ok(other)) => {
                check(&[leader, other]);
                true
            }
            (Err(Error::Listen { .. }), _) => false,
            other => panic!("{other:?}"),
        }
    });
    assert!(met_again);
}

/// Starts a rank as a process: this test, with a launcher's variables.
fn process(rank: &str, port: &str) -> std::process::Child {
    let name = "rendezvous::tests::processes_meet_through_the_environment";
    std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env("GIRANDOLE_TEST_RANK", "1")
        .env("GIRANDOLE_SECRET", secret().unwrap().to_hex())
        .env("GIRANDOLE_TIMEOUT", "20")
        .envs([("RANK", rank), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn processes_meet_through_the_environment() {
    if std::env::var_os("GIRANDOLE_TEST_RANK").is_some() {
        let meeting = meet(&TcpConfig::from_env().unwrap()).unwrap();
        let pids: std::collections::HashSet<_> =
            meeting.lines.data_connections.peers().iter().map(|peer| peer.pid).collect();
        assert!(pids.len() == 3 && pids.contains(&std::process::id()));
        return;
    }
    // Another test may take the port meanwhile: then the next one is tried.
    let met = (0..3).any(|_| {
        let port = point().1.to_string();
        let mut ranks = ["0", "1", "2"].map(|rank| process(rank, &port));
        let ends = ranks.each_mut().map(|rank| rank.wait().unwrap().success());
        ends == [true; 3]
    });
    assert!(met);
}

#[test]
fn ranks_meet_through_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    for world_size in 2..=5 {
        let ranks = (0..world_size).rev().map(|rank| joining(file(rank, world_size, &path)));
        let mut ranks: Vec<_> = ranks.collect();
        ranks.reverse();
        check(&meetings(ranks));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the file is gone");
    }
}

#[test]
fn what_an_earlier_run_left_in_the_file_does_no_harm() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("meeting");
    let nonce = [7u8; 32];
    let gone = point().1;
    // A listener that accepts connections and never sends anything, and the meeting point of another run.
    let (silent, other_run) = (point(), point());
    let options = Options { listener: Some(other_run.0), ..Options::default() };
    let other_leader = thread::spawn(move || {
        meet_with(&TcpConfig { timeout: Duration::from_secs(3), ..tcp(0, 2, 1) }, options)
    });
    for port in [gone, silent.1, other_run.1] {
        let stale = serde_json::json!({ "address": format!("127.0.0.1:{port}"), "nonce": nonce });
        for stale in [stale.to_string().into_bytes(), b"{\"address\":\0rubbish".to_vec()] {
            fs::write(&path, stale).unwrap();
            let limits = Limits { handshake: Duration::from_millis(500), ..Limits::default() };
            let options = move || Options { listener: None, limits, ..Options::default() };
            let start = |rank| {
                let config = file(rank, 3, &path);
                thread::spawn(move || meet_with(&config, options()))
            };
            let others = [start(1), start(2)];
            let ranks = std::iter::once(start(0)).chain(others).collect();
            check(&meetings(ranks));
            assert!(!path.exists());
        }
    }
    assert!(other_leader.join().unwrap().is_err());
}
