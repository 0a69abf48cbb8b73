//! A large number of foreign connections of every kind, during the rendezvous and during the work: the job must not be
//! affected.
//!
//! `STRANGERS=6000 cargo test --workspace --test faults crowd -- --nocapture` uses that many, and prints the
//! measurements.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use socket2::SockRef;

use crate::dice::Dice;
use crate::group::{Group, Setup};
use crate::strangers::{ports, waiting};

/// Additional memory that a rank may need under attack.
const MEMORY_KIB: u64 = 4 * 1024;
/// Maximum number of connections that one attacker holds at a time.
const HELD: usize = 500;
const OPENING: &[u8] = b"girandle\x06\0................................";

fn strangers() -> usize {
    std::env::var("STRANGERS").map_or(1_500, |count| count.parse().unwrap())
}

/// Returns the peak memory of a process so far.
fn peak_kib(pid: Pid) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

fn peaks(group: &Group) -> Vec<u64> {
    group.all().map(|rank| peak_kib(group.pid(rank))).collect()
}

/// An attacker that connects again and again.
struct Attacker {
    dice: Dice,
    held: VecDeque<TcpStream>,
    dripping: VecDeque<(TcpStream, usize)>,
}

impl Attacker {
    fn new(seed: u64) -> Self {
        Self { dice: Dice(seed), held: VecDeque::new(), dripping: VecDeque::new() }
    }

    fn rubbish(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.dice.below(256) as u8).collect()
    }

    /// Does one of the kinds of attack on a new connection. Errors are ignored: the rank may close the connection at
    /// any time.
    fn do_to(&mut self, mut stream: TcpStream, kind: usize) {
        let _ = stream.set_write_timeout(Some(Duration::from_millis(20)));
        let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
        let say = |stream: &mut TcpStream, parts: &[&[u8]]| drop(stream.write_all(&parts.concat()));
        let few = self.dice.below(OPENING.len() as u64) as usize;
        match kind % KINDS {
            // Nothing at all.
            0 => {}
            1 => return,
            2 => return drop(SockRef::from(&stream).set_linger(Some(Duration::ZERO))),
            3 => drop(stream.shutdown(Shutdown::Write)),
            // A part of a handshake, and then silence.
            4 => say(&mut stream, &[&OPENING[..few]]),
            5 => say(&mut stream, &[OPENING]),
            // A handshake without the secret.
            6 => {
                say(&mut stream, &[OPENING]);
                let _ = stream.read_exact(&mut [0; 42]);
                let proof = self.rubbish(32);
                say(&mut stream, &[&3_u32.to_le_bytes(), &4_u32.to_le_bytes(), &[2], &proof]);
                let _ = stream.read(&mut [0]);
            }
            // Echoes what it receives.
            7 => {
                say(&mut stream, &[OPENING]);
                let mut opening = [0; 42];
                if stream.read_exact(&mut opening).is_ok() {
                    say(&mut stream, &[&opening]);
                }
            }
            // Random data: short, long, with excessive lengths, TLS-like or of another protocol.
            8 => {
                let bytes = self.rubbish(4096);
                say(&mut stream, &[&bytes[..few], &bytes]);
            }
            9 => say(&mut stream, &[OPENING, &[0xff; 300_000]]),
            10 => say(&mut stream, &[&[0xff; 64]]),
            11 => {
                let bytes = self.rubbish(200);
                say(&mut stream, &[b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03", &bytes]);
            }
            12 => say(&mut stream, &[b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]),
            // A handshake, one byte at a time.
            _ => return self.dripping.push_back((stream, 0)),
        }
        self.held.push_back(stream);
    }

    fn drip(&mut self) {
        self.dripping.retain_mut(|(stream, at)| {
            *at += 1;
            *at <= OPENING.len() && stream.write_all(&OPENING[*at - 1..*at]).is_ok()
        });
        if self.held.len() > HELD {
            self.held.pop_front();
        }
        if self.dripping.len() > HELD / 4 {
            self.dripping.pop_front();
        }
    }
}

const KINDS: usize = 14;

/// Answer in place of the version, to a client of the right version whose opening shows that it does not hold the job's
/// secret.
const NO_SECRET: [u8; 2] = [0xfe, 0xff];

/// Checks that `OPENING` has the right version: other versions get another answer, and would test nothing.
fn assert_known(port: &SocketAddr) {
    let (mut stream, mut answer) = (TcpStream::connect(port).unwrap(), [0; 42]);
    stream.write_all(OPENING).unwrap();
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(answer[..10], [&OPENING[..8], &NO_SECRET].concat(), "the version of the protocol");
}

/// Makes `count` connections, to each of the ports in turn. Returns the number that succeeded, and the attackers, which
/// still hold some.
fn attack(ports: &[SocketAddr], count: usize) -> (usize, Vec<Attacker>) {
    let made = AtomicUsize::new(0);
    let attackers = std::thread::scope(|scope| {
        let attackers = [0, 1, 2, 3].map(|number| {
            let made = &made;
            scope.spawn(move || {
                let mut attacker = Attacker::new(number as u64);
                for turn in (number..count).step_by(4) {
                    // Each kind of attack is made on each port.
                    let port = ports[turn / KINDS % ports.len()];
                    if let Ok(stream) = TcpStream::connect_timeout(&port, Duration::from_secs(10)) {
                        made.fetch_add(1, Ordering::Relaxed);
                        attacker.do_to(stream, turn);
                    }
                    attacker.drip();
                }
                attacker
            })
        });
        attackers.map(|attacker| attacker.join().unwrap())
    });
    (made.into_inner(), attackers.into())
}

#[test]
fn a_job_among_strangers_ends_well_and_needs_no_more_memory() {
    let mut quiet = Group::start(&["some 7 300; ready; await; barrier"; 4], &Setup::default());
    quiet.ready(0..4);
    let normal = *peaks(&quiet).iter().max().unwrap();
    quiet.tell_all(0..4);
    quiet.assert_all_done();

    let (count, began) = (strangers(), Instant::now());
    let script = "some 7 300; polite 7";
    let mut group = Group::empty(4, &Setup::default());
    (0..3).for_each(|rank| group.add(rank, script));
    let meeting = waiting(&group);
    assert_known(&group.meeting_point());
    let (met, _held) = attack(&meeting, count / 2);
    group.add(3, script);
    group.ready(0..4);
    let ports: Vec<SocketAddr> = group.all().flat_map(|rank| ports(group.pid(rank))).collect();
    assert_eq!(ports.len(), 4);
    let (worked, _held) = attack(&ports, count - count / 2);
    assert_eq!(met + worked, count, "the ranks listen all the time");
    let peaks = peaks(&group);
    println!(
        "{met} strangers while ranks met, {worked} while they worked, in {:.1} s; peaks of {normal} KiB without, {peaks:?} \
         with them",
        began.elapsed().as_secs_f64()
    );
    group.tell_all(0..4);
    group.assert_all_done();
    assert!(
        peaks.iter().all(|peak| *peak <= normal + MEMORY_KIB),
        "{peaks:?} KiB, without strangers {normal}"
    );
}

/// Connections that cannot be accepted, because the process has no file descriptors left, do not harm the work.
#[test]
fn a_rank_that_can_accept_nobody_works_on() {
    let script = "barrier; all_reduce f32 1000 sum; limit; ready; await; barrier; all_reduce f32 1000 sum";
    let mut group = Group::start(&[script; 2], &Setup::default());
    group.ready(0..2);
    let ports: Vec<SocketAddr> = group.all().flat_map(|rank| ports(group.pid(rank))).collect();
    let (made, _held) = attack(&ports, 300);
    assert!(made > 0);
    // Longer than the rank pauses accepting.
    std::thread::sleep(Duration::from_millis(300));
    group.tell_all(0..2);
    for ending in group.finish_all() {
        ending.assert_done();
        let warnings = ending.stderr.matches("WARN cannot accept connections").count();
        assert_eq!(warnings, 1, "once is enough: {}", ending.stderr);
    }
}
