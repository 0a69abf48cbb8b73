//! Ten thousand ranks meet, over a model of a network: what it takes in messages, bytes and time, by the messages that are sent and
//! the rules by which they are (`assembly`, `table`, `base::tree`).

use std::time::Duration;

use serde::Serialize;

use super::assembly::{Assembly, TableMessages};
use super::machine::BuildInfo;
use super::message::{Entry, Hello, Table, ToLeader, ToMember};
use super::table::{PASSES, Step, patience};
use crate::base::network_model::{LinkModel, Network};
use crate::base::tree;
use crate::connection::obstacle::Obstacle;
use crate::connection::wire::HandshakeStream;
use crate::transport::site::Site;

pub(super) const RANKS: usize = 10_000;
/// 10 Gbit/s, between two racks.
pub(super) const LINK: LinkModel =
    LinkModel { latency: Duration::from_micros(200), bytes_per_second: 1.25e9 };
/// Bytes of the messages of a handshake, with those that open the connection, from the rank that dials and to it in turn.
pub(super) const HANDSHAKE: [usize; 6] = [40, 40, 42, 42, 41, 41];
/// How long rank 0 waits.
const TIMEOUT: Duration = Duration::from_secs(10);

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Purpose {
    Control,
    Table,
    Data,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Packet {
    /// A message of the handshake between the rank that dials and another one.
    Handshake {
        step: usize,
        ranks: [usize; 2],
        purpose: Purpose,
    },
    Hello,
    Table,
    /// At this rank.
    TableAt(usize),
    /// From this rank.
    Connected(usize),
    Complete,
    /// This rank has waited long enough.
    TimeOver(Step),
}

pub(super) struct Meeting {
    world_size: usize,
    pub(super) network: Network<Packet>,
    messages: TableMessages,
    assembly: Assembly,
    /// Number of ranks that have registered.
    here: usize,
    /// By rank.
    ranks: Vec<Rank>,
    /// Number of ranks that have heard that all are connected, and when the last of them did.
    pub(super) complete: usize,
    pub(super) completed: Duration,
    /// A rank that stands still once it is registered.
    stopped: Option<usize>,
    /// The rank that gave up first, the one that it waited for, and when.
    gave_up: Option<(usize, usize, Duration)>,
}

#[derive(Clone, Default)]
struct Rank {
    has_table: bool,
    is_connected: bool,
    /// Ranks that have proved who they are at its listener, which it serves from when it has the table.
    waiting: Vec<(usize, Purpose)>,
}

pub(super) fn hello(rank: usize) -> Hello {
    Hello {
        ip: None,
        port: 40_000,
        host: format!("node-{:04}", rank / 8),
        pid: 100_000,
        site: Site::own(Some(Obstacle::Unwanted)),
        timeout_ms: TIMEOUT.as_millis() as u64,
        regroup_port: 0,
        machine: BuildInfo::own(),
    }
}

pub(super) fn bytes<T: Serialize>(message: &T) -> usize {
    HandshakeStream::frame(message).unwrap().len()
}

impl Meeting {
    fn new(world_size: usize, stopped: Option<usize>) -> Self {
        let Hello { port, pid, site, regroup_port, .. } = hello(0);
        let entry = |rank: usize| {
            let host = rank / 8;
            let address = ([10, 0, (host / 256) as u8, (host % 256) as u8], port).into();
            Entry { address, host: hello(rank).host, pid, site: site.clone(), regroup_port }
        };
        let timeout_ms = TIMEOUT.as_millis() as u64;
        let table = Table { session: [7; 32], timeout_ms, ranks: (0..world_size).map(entry).collect() };
        Self {
            world_size,
            network: Network::new(world_size, LINK),
            messages: TableMessages::new(table).unwrap(),
            assembly: Assembly::new(world_size),
            here: 1,
            ranks: vec![Rank::default(); world_size],
            complete: 0,
            completed: Duration::ZERO,
            stopped,
            gave_up: None,
        }
    }

    /// Lets all ranks come at once, and everything happen.
    fn run(mut self) -> Self {
        (1..self.world_size).for_each(|rank| self.handshake(0, [rank, 0], Purpose::Control));
        self.conclude()
    }

    /// A meeting of ranks that are connected to rank 0 and registered.
    pub(super) fn of_registered(world_size: usize) -> Self {
        let mut meeting = Self::new(world_size, None);
        meeting.send_table();
        meeting.conclude()
    }

    /// Lets everything happen until all is quiet, or a rank gives up.
    fn conclude(mut self) -> Self {
        self.ranks[0].has_table = true;
        while let Some((at, packet)) = self.network.next() {
            let registers = matches!(packet, Packet::Handshake { purpose: Purpose::Control, .. });
            if Some(at) == self.stopped && !registers {
                continue;
            }
            self.receive(at, packet);
            if self.gave_up.is_some() {
                break;
            }
        }
        self
    }

    fn handshake(&mut self, step: usize, ranks: [usize; 2], purpose: Purpose) {
        let [from, to] = [ranks[step % 2], ranks[1 - step % 2]];
        self.network.send(from, to, HANDSHAKE[step], Packet::Handshake { step, ranks, purpose });
    }

    fn receive(&mut self, at: usize, packet: Packet) {
        match packet {
            Packet::Handshake { step: 4, ranks: [dialer, _], purpose } => {
                self.ranks[at].waiting.push((dialer, purpose));
                self.serve(at);
            }
            Packet::Handshake { step: 5, ranks: [_, other], purpose } => self.opened(at, other, purpose),
            Packet::Handshake { step, ranks, purpose } => self.handshake(step + 1, ranks, purpose),
            Packet::Hello => {
                self.here += 1;
                if self.here == self.world_size {
                    self.send_table();
                }
            }
            Packet::TableAt(source) => {
                self.wait_for(at, Step::Table);
                self.handshake(0, [at, source], Purpose::Table);
            }
            Packet::Table => {
                self.ranks[at].has_table = true;
                self.serve(at);
                self.wait_for(at, Step::Neighbour);
                self.handshake(0, [at, at - 1], Purpose::Data);
            }
            Packet::Connected(rank) => {
                assert!(self.assembly.connect(rank));
                if self.assembly.is_complete() {
                    let complete = bytes(&ToMember::Complete);
                    (1..self.world_size)
                        .for_each(|rank| self.network.send(0, rank, complete, Packet::Complete));
                }
            }
            Packet::Complete => (self.complete, self.completed) = (self.complete + 1, self.network.now()),
            Packet::TimeOver(step) => {
                let Rank { has_table, is_connected, .. } = self.ranks[at];
                let awaited = match step {
                    Step::Table if !has_table => tree::parent(at, PASSES),
                    Step::Neighbour if !is_connected => at - 1,
                    _ => return,
                };
                self.gave_up = Some((at, awaited, self.network.now()));
            }
        }
    }

    /// Answers those that wait at a rank's listener, if that is served.
    fn serve(&mut self, at: usize) {
        if !self.ranks[at].has_table {
            return;
        }
        for (dialer, purpose) in std::mem::take(&mut self.ranks[at].waiting) {
            self.handshake(5, [dialer, at], purpose);
            if purpose == Purpose::Table {
                let table = self.messages.to(1).unwrap().len();
                self.network.send(at, dialer, table, Packet::Table);
            }
        }
    }

    fn opened(&mut self, at: usize, other: usize, purpose: Purpose) {
        match purpose {
            Purpose::Control => self.network.send(at, other, bytes(&hello(at)), Packet::Hello),
            Purpose::Table => {}
            Purpose::Data => {
                self.ranks[at].is_connected = true;
                self.network.send(at, 0, bytes(&ToLeader::Connected), Packet::Connected(at));
            }
        }
    }

    fn send_table(&mut self) {
        for rank in 1..self.world_size {
            let bytes = self.messages.to(rank).unwrap().len();
            let packet = match tree::parent(rank, PASSES) {
                0 => Packet::Table,
                source => Packet::TableAt(source),
            };
            self.network.send(0, rank, bytes, packet);
        }
    }

    fn wait_for(&mut self, at: usize, step: Step) {
        let time = self.network.now() + patience(TIMEOUT, (at, self.world_size), step);
        self.network.at(time, at, Packet::TimeOver(step));
    }
}

#[test]
fn ten_thousand_meet() {
    let meeting = Meeting::new(RANKS, None).run();
    assert_eq!(meeting.complete, RANKS - 1);
    assert!(meeting.gave_up.is_none());
    let [messages, bytes] = meeting.network.sent_by(0);
    let ([all, all_bytes], time) = (meeting.network.sent(), meeting.completed);
    println!("rank 0: {messages} messages, {bytes} bytes; all: {all} messages, {all_bytes} bytes; {time:?}");
    // Rank 0 sends three messages of a handshake to each other rank (and a few for data), then the table or where it is, and
    // that all are connected.
    assert!((5 * (RANKS - 1)..5 * RANKS + 5).contains(&messages), "{messages} messages");
    let table = meeting.messages.to(1).unwrap().len();
    assert!(bytes < PASSES * table + 500 * RANKS, "{bytes} bytes, {table} of them the table");
    // A table in all for each rank, whoever sends it.
    assert!(all_bytes < RANKS * (table + 2000), "{all_bytes} bytes");
    // Five levels, on each of which a rank sends eight tables.
    assert!(time < Duration::from_millis(100), "{time:?}");
}

#[test]
fn of_ten_thousand_the_one_that_stands_still_is_named_first() {
    // It passes the table on to some that pass it on, or to nobody.
    for stopped in [1, 5, 42, 700, 9_990, RANKS - 2] {
        let meeting = Meeting::new(RANKS, Some(stopped)).run();
        let (_, awaited, time) = meeting.gave_up.unwrap();
        assert_eq!(awaited, stopped);
        // Rank 0 is told before its own time is over.
        assert!(time + 4 * LINK.latency < TIMEOUT, "{time:?}");
    }
    // Nobody waits for the last one but rank 0.
    let meeting = Meeting::new(RANKS, Some(RANKS - 1)).run();
    assert!(meeting.gave_up.is_none() && !meeting.assembly.is_complete());
    assert_eq!(meeting.assembly.late(), [RANKS - 1]);
}
