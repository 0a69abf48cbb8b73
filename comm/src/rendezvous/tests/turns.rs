//! Ranks that are slow between their proof and the end of the meeting, while others connect.

use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};

use super::strangers::overheard;
use super::*;
use crate::Tls;
use crate::connection::handshake::KNOWN;

/// Delay of each piece of data in one direction.
const WAY: Duration = Duration::from_millis(100);

/// Decides about data from rank 0 (`true`) or to it: its delay, or `None` to end the connection there.
type Passing = dyn Fn(usize, bool, usize) -> Option<Duration> + Send + Sync;

/// Returns a port that relays to `port`. `passing` is called for each piece of data: number of the connection, whether it
/// comes from rank 0, and bytes before it.
fn way_to(port: u16, passing: Arc<Passing>) -> u16 {
    let (listener, way) = point();
    thread::spawn(move || {
        for (number, here) in listener.incoming().map_while(std::io::Result::ok).enumerate() {
            let Ok(there) = TcpStream::connect(("127.0.0.1", port)) else { return };
            for (from, to, outgoing) in [(&here, &there, false), (&there, &here, true)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                let passing = passing.clone();
                thread::spawn(move || pass(from, to, |passed| passing(number, outgoing, passed)));
            }
        }
    });
    way
}

fn pass(mut from: TcpStream, mut to: TcpStream, passing: impl Fn(usize) -> Option<Duration>) {
    let (late, pieces) = channel::<(Instant, Vec<u8>)>();
    let mut other_end = to.try_clone().unwrap();
    let sending = thread::spawn(move || {
        for (due, piece) in pieces {
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                return;
            }
        }
        let _ = to.shutdown(Shutdown::Write);
    });
    forward(&mut from, &mut other_end, late, passing);
    let _ = sending.join();
}

fn forward(
    from: &mut TcpStream,
    to: &mut TcpStream,
    late: Sender<(Instant, Vec<u8>)>,
    passing: impl Fn(usize) -> Option<Duration>,
) {
    let (mut buffer, mut passed) = ([0; 4096], 0);
    while let Ok(got @ 1..) = from.read(&mut buffer) {
        let Some(delay) = passing(passed) else {
            let _ = [from, to].map(|stream| stream.shutdown(Shutdown::Both));
            return;
        };
        passed += got;
        if late.send((Instant::now() + delay, buffer[..got].to_vec())).is_err() {
            return;
        }
    }
}

/// Keeps many connections open that send no more than `words`, and opens new ones when they are closed.
fn crowd(address: SocketAddr, words: &[u8], over: &AtomicBool) {
    let connect = || {
        let mut stream = TcpStream::connect_timeout(&address, WAY).ok()?;
        stream.write_all(words).ok()?;
        stream.set_nonblocking(true).ok().map(|()| stream)
    };
    let mut streams: Vec<Option<TcpStream>> = (0..100).map(|_| connect()).collect();
    while !over.load(Ordering::Acquire) {
        for stream in &mut streams {
            let mut some = [0; 100];
            let is_open = |stream: &mut TcpStream| {
                stream
                    .read(&mut some)
                    .map_or_else(|error| error.kind() == std::io::ErrorKind::WouldBlock, |got| got > 0)
            };
            if !stream.as_mut().is_some_and(is_open) {
                *stream = connect();
            }
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Three ranks, each message of which is delayed, meet in a crowd.
fn meet_in_a_crowd(words: &[u8], tls: Tls) {
    let (listener, port) = point();
    let way = way_to(port, Arc::new(|_, _, _| Some(WAY)));
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| crowd(([127, 0, 0, 1], port).into(), words, &over));
        let config = |rank, port| TcpConfig { tls, ..tcp(rank, 3, port) };
        let ranks =
            vec![leading(config(0, port), listener), joining(config(1, way)), joining(config(2, way))];
        let ends = ends(ranks);
        over.store(true, Ordering::Release);
        check(&ends.into_iter().map(|end| end.unwrap()).collect::<Vec<_>>());
    });
}

#[test]
fn ranks_far_away_in_a_silent_crowd() {
    meet_in_a_crowd(b"", Tls::Off);
}

#[test]
fn ranks_far_away_that_encrypt_in_a_silent_crowd() {
    meet_in_a_crowd(b"", Tls::All);
}

#[test]
fn ranks_far_away_in_a_crowd_that_begins_to_speak() {
    meet_in_a_crowd(&KNOWN[..41], Tls::Off);
}

#[test]
fn ranks_far_away_in_a_crowd_that_speaks() {
    meet_in_a_crowd(&KNOWN, Tls::Off);
}

#[test]
fn ranks_far_away_in_a_crowd_that_says_what_it_has_overheard() {
    meet_in_a_crowd(&overheard(), Tls::Off);
}

/// Two ranks meet; `passing` relays the connections to rank 0.
fn meet_by(limits: Limits, passing: Arc<Passing>) {
    let (listener, port) = point();
    let way = way_to(port, passing);
    let options = Options { listener: Some(listener), limits, ..Options::default() };
    let leader = thread::spawn(move || meet_with(&tcp(0, 2, port), options));
    check(&meetings(vec![leader, joining(tcp(1, 2, way))]));
}

/// Length of a rank's opening and claim.
const PROOF: usize = 42 + 41;

#[test]
fn a_rank_that_is_let_in_has_the_time_that_ranks_have() {
    let limits = Limits { handshake: Duration::from_millis(200), ..Limits::default() };
    let late = Duration::from_millis(600);
    meet_by(
        limits,
        Arc::new(move |_, from_leader, passed| {
            Some(if !from_leader && passed >= PROOF { late } else { Duration::ZERO })
        }),
    );
}

#[test]
fn a_rank_whose_connection_is_closed_comes_again() {
    // The first connection ends before rank 0 has read the introduction; the others are relayed whole.
    meet_by(
        Limits::default(),
        Arc::new(|number, from_leader, passed| {
            (number > 0 || from_leader || passed < PROOF).then_some(Duration::ZERO)
        }),
    );
}
