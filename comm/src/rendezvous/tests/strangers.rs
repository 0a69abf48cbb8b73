//! Other processes that connect during rendezvous.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use proptest::prelude::*;

use super::*;
use crate::connection::handshake::{Client, ClientClaim, KNOWN, Opening, Purpose};
use crate::connection::wire::HandshakeStream;

const EACH: usize = 100;

/// Opens `EACH` connections, as far as the system allows: the listener's queue may be full.
fn connections(address: SocketAddr) -> Vec<TcpStream> {
    (0..EACH).filter_map(|_| TcpStream::connect_timeout(&address, Duration::from_millis(300)).ok()).collect()
}

/// Three ranks meet while `strangers` connect to rank 0.
fn meet_among(strangers: impl FnOnce(SocketAddr, &AtomicBool) + Send) {
    let (listener, port) = point();
    let limits = Limits { handshake: Duration::from_millis(300), ..Limits::default() };
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let over = &over;
        scope.spawn(move || strangers(([127, 0, 0, 1], port).into(), over));
        let mut listener = Some(listener);
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let options = Options { listener: listener.take(), limits, ..Options::default() };
                thread::spawn(move || meet_with(&tcp(rank, 3, port), options))
            })
            .collect();
        let ends = ends(ranks);
        over.store(true, Ordering::Release);
        check(&ends.into_iter().map(|end| end.unwrap()).collect::<Vec<_>>());
    });
}

/// Opening of an eavesdropper that replays a rank's.
pub(super) fn overheard() -> Opening {
    let caller = ClientClaim { rank: 1, world_size: 3, purpose: Purpose::Control };
    *Client::new(&Credentials::new(secret().as_ref(), ""), caller).unwrap().opening()
}

fn until(over: &AtomicBool) {
    while !over.load(Ordering::Acquire) {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn who_leaves_at_once() {
    meet_among(|address, _| drop(connections(address)));
}

#[test]
fn who_leaves_with_a_reset() {
    meet_among(|address, _| {
        for stream in connections(address) {
            let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
        }
    });
}

#[test]
fn who_says_nothing() {
    meet_among(|address, over| {
        let _silent = connections(address);
        until(over);
    });
}

#[test]
fn who_talks_rubbish() {
    meet_among(|address, over| {
        let mut talking = connections(address);
        for (number, stream) in talking.iter_mut().enumerate() {
            let request = format!("GET /{number} HTTP/1.1\r\nHost: localhost\r\n\r\n").repeat(10);
            let _ = stream.write_all(request.as_bytes());
        }
        until(over);
    });
}

#[test]
fn who_drips() {
    meet_among(|address, over| {
        let mut dripping = connections(address);
        let overheard = overheard();
        let mut message = overheard.iter().cycle();
        while !over.load(Ordering::Acquire) {
            let Some(&byte) = message.next() else { return };
            dripping.retain_mut(|stream| stream.write_all(&[byte]).is_ok());
            thread::sleep(Duration::from_millis(20));
        }
    });
}

#[test]
fn who_floods() {
    meet_among(|address, over| {
        let flood = vec![0xa5; 1 << 20];
        for mut stream in connections(address) {
            let _ = stream.set_write_timeout(Some(Duration::from_millis(10)));
            let _ = stream.write_all(&overheard());
            let _ = stream.write_all(&flood);
        }
        until(over);
    });
}

#[test]
fn who_has_another_secret() {
    meet_among(|address, over| {
        let wrong = Credentials::new(Some(&Secret::random().unwrap()), "");
        let caller = ClientClaim { rank: 1, world_size: 3, purpose: Purpose::Control };
        for _ in 0..EACH {
            if over.load(Ordering::Acquire) {
                return;
            }
            let deadline = Instant::now() + Duration::from_secs(1);
            assert!(HandshakeStream::connect(address, &wrong, caller, deadline).is_err());
        }
    });
}

#[test]
fn who_knows_the_opening_and_no_more() {
    meet_among(|address, over| {
        let mut half_way = connections(address);
        for stream in &mut half_way {
            let mut opening = overheard();
            let _ = stream.write_all(&opening);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(10)));
            let _ = stream.read_exact(&mut opening);
            let _ = stream.write_all(&[0; 41]);
        }
        until(over);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_get_anyone_in(mut bytes in prop::collection::vec(any::<u8>(), 0..200), is_ours: bool, kind in 0..3) {
        if is_ours && bytes.len() >= 10 {
            bytes[..10].copy_from_slice(&KNOWN[..10]);
        }
        let (listener, port) = point();
        let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stranger.write_all(&bytes).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        let mut wire = HandshakeStream::new(listener.accept().unwrap().0, None).unwrap();
        let deadline = Instant::now() + LONG;
        let credentials = Credentials::new(None, "");
        let let_in = match kind {
            0 => wire.accept(&credentials, deadline).is_ok(),
            1 => wire.receive::<message::Hello>(message::HELLO_LIMIT, deadline).is_ok(),
            _ => wire.receive::<message::ToLeader>(message::LIMIT, deadline).is_ok(),
        };
        prop_assert!(!let_in);
    }
}

#[test]
fn a_message_is_refused_before_room_is_made_for_it() {
    let (listener, port) = point();
    let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stranger.write_all(&u32::MAX.to_le_bytes()).unwrap();
    let mut wire = HandshakeStream::new(listener.accept().unwrap().0, None).unwrap();
    let end = wire.receive::<message::Hello>(message::HELLO_LIMIT, Instant::now() + LONG);
    assert!(end.unwrap_err().to_string().contains("at most 1024"));
}

#[test]
fn a_rank_that_comes_for_data_is_not_taken_for_a_member() {
    let (listener, port) = point();
    let short = TcpConfig { timeout: Duration::from_millis(500), ..tcp(0, 2, port) };
    let leader = leading(short, listener);
    let caller = ClientClaim { rank: 1, world_size: 2, purpose: Purpose::Data };
    let credentials = Credentials::new(secret().as_ref(), "");
    let (_, verdict) =
        HandshakeStream::connect(([127, 0, 0, 1], port).into(), &credentials, caller, Instant::now() + LONG)
            .unwrap();
    assert_eq!(verdict.status, crate::connection::handshake::HandshakeStatus::NotAwaited);
    assert!(leader.join().unwrap().unwrap_err().to_string().contains("rank 1 is missing"));
}
