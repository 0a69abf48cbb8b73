//! Tests of both ends of the same memory, in two threads.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::dup;

use super::handover::DescriptorExchange;
use super::host::RingPair;
use super::region::{CAPACITY, Region};
use super::ring::{Reader, Writer};
use super::wake_up::WakeUp;
use crate::connection::obstacle::Obstacle;
use crate::platform::shared;
use crate::transport::hybrid_links::HybridLinks;
use crate::transport::links::{Closed, Links, Wait};
use crate::transport::tcp::connections::DataConnections;
use crate::transport::tcp::links::TcpLinks;

/// Longer than any test sleeps, unless a wake-up gets lost.
const NEVER: Duration = Duration::from_secs(20);

/// A small deterministic random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }
}

fn ring() -> (Writer, Reader) {
    let (here, file) = Region::create(&[7; 32]).unwrap();
    let there = Region::open(&file).unwrap();
    let wake_up = || Arc::new(WakeUp::new().unwrap());
    (Writer::new(there, wake_up()), Reader::new(here, wake_up()))
}

fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one, listener.accept().unwrap().0]
}

/// Returns the links of ranks 0 and 1, and the switchboards that hold the connections beside their memory.
fn links(crowded: bool) -> [(HybridLinks, Arc<DataConnections>); 2] {
    let wake_ups = [0, 1].map(|_| Arc::new(WakeUp::new().unwrap()));
    let [first, second] = [0, 1].map(|_| Region::create(&[7; 32]).unwrap());
    let files = [&second.1, &first.1].map(|file| Region::open(file).unwrap());
    let ends = [(first.0, 0), (second.0, 1)].into_iter().zip(files).zip(sockets());
    let links = ends.map(|(((inbox, rank), outbox), socket)| {
        let wake_up = Arc::new(WakeUp::of(dup(wake_ups[1 - rank].handle()).unwrap()));
        let pair = RingPair {
            reader: Reader::new(inbox, wake_up.clone()),
            writer: Writer::new(outbox, wake_up),
            gone: false,
        };
        let mut connections = vec![None, None];
        connections[1 - rank] = Some((socket, Some(pair)));
        let data_connections = DataConnections::with(rank, connections);
        let wake_up = wake_ups[rank].clone();
        let sockets = TcpLinks::new(data_connections.clone(), 1);
        let mut links = HybridLinks::new(sockets, wake_up, crowded);
        assert!(links.open(1 - rank).unwrap());
        (links, data_connections)
    });
    links.collect::<Vec<_>>().try_into().unwrap_or_else(|_| unreachable!())
}

/// Sends and receives `total` bytes in pieces of random sizes, sleeping whenever there is nothing to do.
fn exchange(links: &mut HybridLinks, rank: usize, total: usize, largest: usize, sleeps: &AtomicU64) {
    let mut random = Random(rank as u64);
    let byte = |from: usize, at: usize| (at.wrapping_mul(31) ^ (at >> 8) ^ from) as u8;
    let (peer, mut sent, mut got) = (1 - rank, 0, 0);
    let mut buffer = vec![0; largest + 1];
    while sent < total || got < total {
        let mut moved = 0;
        if sent < total {
            let len = (1 + random.below(largest)).min(total - sent);
            let head = random.below(len.min(32));
            buffer[..len].iter_mut().enumerate().for_each(|(index, b)| *b = byte(rank, sent + index));
            let (head, body) = buffer[..len].split_at(head);
            moved += links.try_send(peer, head, body).unwrap();
            sent += moved;
        }
        if got < total {
            let len = (1 + random.below(largest)).min(total - got);
            let count = if random.below(2) == 0 {
                let bytes = links.peek(peer).unwrap().unwrap();
                let len = len.min(bytes.len());
                buffer[..len].copy_from_slice(&bytes[..len]);
                links.consume(peer, len);
                len
            } else {
                links.try_recv(peer, &mut buffer[..len]).unwrap()
            };
            buffer[..count].iter().enumerate().for_each(|(index, b)| assert_eq!(*b, byte(peer, got + index)));
            got += count;
            moved += count;
        }
        match random.below(500) {
            0 => std::thread::sleep(Duration::from_micros(200)),
            1 => std::thread::yield_now(),
            _ => {}
        }
        if moved == 0 {
            let wait = Wait { peer, read: got < total, write: sent < total };
            let began = Instant::now();
            sleeps.fetch_add(1, Ordering::Relaxed);
            links.wait(&[wait], NEVER);
            assert!(began.elapsed() < NEVER, "rank {rank} was not woken at {sent} sent, {got} got");
        }
    }
}

#[test]
fn bytes_arrive_in_order_and_nobody_oversleeps() {
    for (total, largest) in [(300_000, 50), (5_000_000, 3_000), (60_000_000, 2 * CAPACITY)] {
        let mut ends = links(false);
        let sleeps = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for (rank, (links, _)) in ends.iter_mut().enumerate() {
                let sleeps = &sleeps;
                scope.spawn(move || {
                    // However the cores are scheduled, rank 0 sleeps at least once before rank 1 begins.
                    while rank == 1 && sleeps.load(Ordering::Relaxed) == 0 {
                        std::thread::yield_now();
                    }
                    exchange(links, rank, total, largest, sleeps);
                });
            }
        });
    }
}

#[test]
fn one_byte_there_and_back_wakes_both() {
    let mut ends = links(true);
    std::thread::scope(|scope| {
        for (rank, (links, _)) in ends.iter_mut().enumerate() {
            scope.spawn(move || {
                for round in 0..20_000u32 {
                    for turn in 0..2 {
                        if turn == rank {
                            assert_eq!(links.try_send(1 - rank, &[], &[round as u8; 16]).unwrap(), 16);
                            continue;
                        }
                        let mut bytes = [0; 16];
                        while links.try_recv(1 - rank, &mut bytes).unwrap() == 0 {
                            let began = Instant::now();
                            links.wait(&[Wait { peer: 1 - rank, read: true, write: false }], NEVER);
                            assert!(began.elapsed() < NEVER, "rank {rank} was not woken in round {round}");
                        }
                        assert_eq!(bytes, [round as u8; 16]);
                    }
                }
            });
        }
    });
}

#[test]
fn what_was_written_before_the_end_is_read_then_the_end_shows() {
    let [mut one, two] = links(false);
    let (mut other, data_connections) = two;
    assert_eq!(other.try_send(0, &[1; 32], &[2; 64]), Ok(96));
    drop((other, data_connections));
    let read = Wait { peer: 1, read: true, write: false };
    let mut bytes = [0; 50];
    assert_eq!(one.0.try_recv(1, &mut bytes), Ok(50));
    one.0.wait(&[read], NEVER);
    assert_eq!(one.0.try_recv(1, &mut bytes), Ok(46));
    assert_eq!(bytes[0..46], [2; 46]);
    one.0.wait(&[read], NEVER);
    assert_eq!(one.0.try_recv(1, &mut bytes), Err(Closed));
    assert_eq!(one.0.peek(1).map(|bytes| bytes.is_err()), Some(true));
    assert_eq!(one.0.try_send(1, &[], &[1]), Err(Closed));
}

#[test]
fn a_group_that_fails_wakes_the_sleeper() {
    let [mut one, _other] = links(false);
    let data_connections = one.1.clone();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            data_connections.shutdown(std::net::Shutdown::Both, None);
        });
        let began = Instant::now();
        one.0.wait(&[Wait { peer: 1, read: true, write: false }], NEVER);
        assert!(began.elapsed() < NEVER);
        assert_eq!(one.0.try_recv(1, &mut [0]), Err(Closed));
    });
}

#[test]
fn a_full_ring_takes_nothing_until_enough_is_free() {
    let (mut writer, mut reader) = ring();
    let bytes = vec![5; CAPACITY + 1];
    let mut sent = 0;
    while let Ok(count @ 1..) = writer.write(&[], &bytes[sent..]) {
        sent += count;
    }
    assert!(sent <= CAPACITY && sent > CAPACITY / 2, "{sent}");
    assert_eq!(reader.read(&mut [0; 100]), Ok(100));
    assert_eq!(writer.has_room(), Ok(false));
    let mut got = 100;
    // The reader publishes its position now and then only, but in time.
    while let Ok(count @ 1..) = reader.read(&mut [0; 100]) {
        got += count;
    }
    assert_eq!((got, writer.has_room()), (sent, Ok(true)));
}

#[test]
fn positions_that_cannot_be_end_the_stream() {
    for wrong in [CAPACITY as u64 + 1, 1 << 63] {
        let (here, file) = Region::create(&[7; 32]).unwrap();
        here.header().head.0.store(wrong, Ordering::SeqCst);
        here.header().tail.0.store(wrong, Ordering::SeqCst);
        let wake_up = || Arc::new(WakeUp::new().unwrap());
        let mut writer = Writer::new(Region::open(&file).unwrap(), wake_up());
        let mut reader = Reader::new(here, wake_up());
        assert_eq!(reader.peek(), Err(Closed));
        assert_eq!(reader.read(&mut [0; 10]), Err(Closed));
        assert_eq!(reader.has_new_bytes(), Err(Closed));
        assert_eq!(writer.has_room(), Err(Closed));
        assert_eq!(writer.write(&[], &[1]), Err(Closed));
    }
}

#[test]
fn only_memory_of_the_right_size_is_mapped() {
    let (_, file) = Region::create(&[9; 32]).unwrap();
    assert_eq!(Region::open(&file).unwrap().token(), [9; 32]);
    assert!(Region::open(&shared::create(CAPACITY).unwrap()).is_err());
    assert!(Region::open(&OwnedFd::from(tempfile::tempfile().unwrap())).is_err());
}

#[test]
fn gifts_find_their_way_by_their_tokens_among_strangers() {
    let (name, soon) =
        ([3; 16].map(|_: u8| std::process::id() as u8), Instant::now() + Duration::from_secs(10));
    let mut taker = DescriptorExchange::open(&name).unwrap();
    let mut giver = DescriptorExchange::open(&name.map(|byte| !byte)).unwrap();
    let wake_up = WakeUp::new().unwrap();
    for token in [[1; 32], [2; 32]] {
        giver.send(&name, &token, [wake_up.handle(), wake_up.handle()], soon).unwrap();
    }
    assert!(taker.receive(&[2; 32], soon).is_ok());
    assert!(taker.receive(&[1; 32], soon).is_ok());
    assert_eq!(taker.receive(&[3; 32], Instant::now()).err(), Some(Obstacle::NotHandedOver));
    drop(taker);
    let gone = giver.send(&name, &[1; 32], [wake_up.handle(), wake_up.handle()], soon);
    assert_eq!(gone, Err(Obstacle::Unreachable));
}
