//! Tests with two ranks in one process that connect to each other, or cannot.

use crate::base::last_message::LastMessage;
use crate::connection::acceptor::{Acceptor, Limits};
use crate::connection::handshake::{HandshakeStatus, Purpose, Verdict};
use crate::connection::obstacle::Obstacle;
use crate::connection::poll_thread::PollThread;
use crate::transport::site::Site;
use std::net::{SocketAddr, TcpListener};
use std::thread;

use super::*;

/// Long enough for a busy machine; a test that comes near it fails.
const LONG: Duration = Duration::from_secs(60);

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn caller(rank: usize) -> ClientClaim {
    ClientClaim { rank: rank as u32, world_size: 2, purpose: Purpose::Data }
}

fn credentials() -> Credentials {
    Credentials::new(None, "switchboard")
}

/// Returns the data connections of one rank of a group of two, which listen at these addresses.
fn data_connections(rank: usize, addresses: [SocketAddr; 2]) -> Arc<DataConnections> {
    let site = Site::own(Some(Obstacle::Unwanted));
    let peer =
        |address| PeerInfo { host: "here".into(), pid: 1, address, site: site.clone(), regroup_port: 0 };
    let setup = Setup {
        own: caller(rank),
        credentials: credentials(),
        peers: Arc::new(addresses.map(peer).to_vec()),
        host: None,
        transport: Transport::Tcp,
        handshake: Duration::from_millis(500),
        timeout: LONG,
    };
    Arc::new(DataConnections::new(setup).unwrap())
}

fn acceptor(data_connections: &Arc<DataConnections>, listener: TcpListener) -> Acceptor {
    Acceptor::start(vec![listener], Limits::default(), data_connections.clone(), &PollThread::default())
        .unwrap()
}

/// Returns both ranks, each with the acceptor of its connections.
fn both() -> [(Arc<DataConnections>, Acceptor); 2] {
    let ((first, one), (second, other)) = (listener(), listener());
    let ranks = [0, 1].map(|rank| data_connections(rank, [one, other]));
    let acceptors = [acceptor(&ranks[0], first), acceptor(&ranks[1], second)];
    ranks.into_iter().zip(acceptors).collect::<Vec<_>>().try_into().unwrap()
}

fn wait(data_connections: &DataConnections, peer: usize) {
    data_connections.wait(&[Wait { peer, read: true, write: false }], LONG);
}

fn connect(
    data_connections: &Arc<DataConnections>,
    peer: usize,
) -> std::result::Result<Arc<Stream>, OpenError> {
    loop {
        match data_connections.take_or_request(peer)? {
            Some((stream, _)) => return Ok(stream),
            None => wait(data_connections, peer),
        }
    }
}

fn assert_connected(streams: [&Stream; 2]) {
    for (from, to) in [(streams[0], streams[1]), (streams[1], streams[0])] {
        let mut byte = [0];
        assert_eq!(from.send(&[7], &[]).unwrap(), 1);
        to.fill(&mut byte);
        assert_eq!(byte, [7]);
    }
}

#[test]
fn two_that_dial_each_other_at_once_get_one_connection() {
    for _ in 0..200 {
        let ranks = both();
        let streams = thread::scope(|scope| {
            let threads = [0, 1].map(|rank| {
                let data_connections = &ranks[rank].0;
                scope.spawn(move || connect(data_connections, 1 - rank).unwrap())
            });
            threads.map(|thread| thread.join().unwrap())
        });
        assert_connected([&streams[0], &streams[1]]);
        ranks.iter().for_each(|(data_connections, _)| data_connections.end());
    }
}

#[test]
fn one_is_enough_whatever_the_other_does() {
    for rank in [0, 1] {
        let ranks = both();
        let stream = connect(&ranks[rank].0, 1 - rank).unwrap();
        wait(&ranks[1 - rank].0, rank);
        let there = connect(&ranks[1 - rank].0, rank).unwrap();
        assert_connected([&stream, &there]);
        ranks.iter().for_each(|(data_connections, _)| data_connections.end());
    }
}

#[test]
fn who_gives_up_before_it_has_seen_the_answer_leaves_no_trace() {
    let ranks = both();
    let address = ranks[0].0.peers()[0].address;
    for _ in 0..20 {
        let until = Instant::now() + LONG;
        let (wire, verdict) = HandshakeStream::connect(address, &credentials(), caller(1), until).unwrap();
        assert_eq!(verdict, Verdict { status: HandshakeStatus::Admitted, rank: 0, world_size: 2 });
        drop(wire);
    }
    assert!(ranks[0].0.connected().is_empty());
    let stream = connect(&ranks[1].0, 0).unwrap();
    let there = connect(&ranks[0].0, 1).unwrap();
    assert_connected([&stream, &there]);
    // A connection exists now, so another one is refused.
    let (_, verdict) =
        HandshakeStream::connect(address, &credentials(), caller(1), Instant::now() + LONG).unwrap();
    assert_eq!(verdict.status, HandshakeStatus::Crossed);
    ranks.iter().for_each(|(data_connections, _)| data_connections.end());
}

/// On a busy machine the answering threads are scheduled in any order.
#[test]
fn one_that_was_given_up_and_is_answered_late_leaves_no_trace() {
    let ranks = both();
    let address = ranks[0].0.peers()[0].address;
    let until = Instant::now() + LONG;
    let dial = || HandshakeStream::connect(address, &credentials(), caller(1), until).unwrap();
    let ((mut kept, _), (given_up, verdict)) = (dial(), dial());
    assert_eq!(verdict.status, HandshakeStatus::Admitted);
    drop(given_up);
    // This rank knows of one attempt's end, and still does not dial: the other may have become the connection.
    let one_left = |state: &mut ConnectionTable| !matches!(state.lines[1], ConnectionState::Answering(1));
    drop(ranks[0].0.changed.wait_timeout_while(ranks[0].0.state(), LONG, one_left).unwrap());
    assert!(matches!(ranks[0].0.take_or_request(1), Ok(None)));
    assert!(matches!(ranks[0].0.dial(1, until), Err(ConnectError::Crossed)));
    kept.write(&[1], until).unwrap();
    let there = connect(&ranks[0].0, 1).unwrap();
    assert_connected([&kept.into_data_stream(), &there]);
    ranks.iter().for_each(|(data_connections, _)| data_connections.end());
}

#[test]
fn where_nobody_or_somebody_else_listens_the_peer_is_unreachable() {
    let ((gone, nobody), (taken, own)) = (listener(), listener());
    drop(gone);
    let alone = data_connections(0, [own, nobody]);
    let Err(OpenError::Unreachable(why)) = connect(&alone, 1) else { panic!() };
    assert!(why.contains("refused") && why.contains(&nobody.to_string()), "{why}");
    alone.end();

    let wrong = data_connections(0, [own, own]);
    let _acceptor = acceptor(&wrong, taken);
    let lost = data_connections(0, [own, own]);
    let Err(OpenError::Unreachable(why)) = connect(&lost, 1) else { panic!() };
    assert!(why.contains("rank 0 answered instead"), "{why}");
    lost.end();
    wrong.end();
}

#[test]
fn a_peer_that_says_nothing_holds_up_nobody_who_leaves() {
    let ((_silent, address), (_, own)) = (listener(), listener());
    let waiting = data_connections(0, [own, address]);
    assert!(matches!(waiting.take_or_request(1), Ok(None)));
    assert!(waiting.last_error(1).contains(&address.to_string()));
    let began = Instant::now();
    waiting.leave(GOODBYE);
    waiting.end();
    assert!(matches!(waiting.take_or_request(1), Err(OpenError::Closed)));
    assert!(began.elapsed() < LONG / 2);
}

#[test]
fn a_group_that_fails_or_closes_ends_every_wait() {
    let cut = |data_connections: &DataConnections| data_connections.shutdown(Shutdown::Both, None);
    for close in [cut, |data_connections: &DataConnections| data_connections.leave(GOODBYE)] {
        let ((_silent, address), (_, own)) = (listener(), listener());
        let waiting = data_connections(0, [own, address]);
        thread::scope(|scope| {
            let waiter = scope.spawn(|| connect(&waiting, 1));
            close(&waiting);
            assert!(matches!(waiter.join().unwrap(), Err(OpenError::Closed)));
        });
        waiting.end();
    }
}

#[test]
fn who_has_left_takes_nobody_in_and_says_so_where_it_might_be_counted_on() {
    let ranks = both();
    let address = ranks[0].0.peers()[0].address;
    let until = Instant::now() + LONG;
    let (mut half, _) = HandshakeStream::connect(address, &credentials(), caller(1), until).unwrap();
    ranks[0].0.leave(GOODBYE);
    half.write(&[1], until).unwrap();
    assert_eq!(half.read::<{ GOODBYE.len() }>(until).unwrap(), GOODBYE);
    let (_, verdict) = HandshakeStream::connect(address, &credentials(), caller(1), until).unwrap();
    assert_eq!(verdict.status, HandshakeStatus::Gone);
    assert!(matches!(connect(&ranks[1].0, 0), Err(OpenError::Left(LastMessage::Farewell))));
    ranks.iter().for_each(|(data_connections, _)| data_connections.end());
}

/// It regards the connection that it has dialed as established, and this rank does not yet. A try of this rank to dial it
/// fails meanwhile.
#[test]
fn what_a_peer_has_sent_before_it_left_is_waited_for() {
    let ((_silent, address), (_, own)) = (listener(), listener());
    let waiting = data_connections(0, [own, address]);
    waiting.state().lines[1] = ConnectionState::Answering(1);
    assert!(matches!(waiting.take_or_request(1), Ok(None)));
    waiting.record_failure(1, &ConnectError::Gone(LastMessage::Farewell));
    assert!(matches!(waiting.take_or_request(1), Ok(None)));
    waiting.state().lines[1] = ConnectionState::Dialing;
    waiting.record_failure(1, &ConnectError::Gone(LastMessage::Farewell));
    assert!(matches!(waiting.take_or_request(1), Err(OpenError::Left(LastMessage::Farewell))));
    waiting.end();
}
