//! Tests of the time-out of an operation, with a peer that sends at a given pace.

use std::time::Instant;

use candle_core::{DType, Device, Tensor};

use super::*;
use crate::base::buffer::staging::Before;
use crate::base::cause::Cause;
use crate::base::fingerprint::LEN;
use crate::base::members::Members;
use crate::engine::runner::{OperationRunner, Run};
use crate::transport::links::Closed;
use crate::{Operation, Stats, Topology};

/// A peer that makes the same calls, accepts everything, and sends zeros. `pieces` maps the bytes sent so far to the
/// length of the next piece and the pause after it.
struct Peer {
    pieces: fn(u64) -> (usize, Duration),
    announcement: Vec<u8>,
    /// How long after the first receive from it the peer begins the call, and the time when it does, once known.
    late: Duration,
    begins: Option<Instant>,
    sent: u64,
    due: Instant,
}

impl Links for Peer {
    fn try_send(&mut self, _: usize, head: &[u8], body: &[u8]) -> std::result::Result<usize, Closed> {
        self.announcement.extend_from_slice(head);
        Ok(head.len() + body.len())
    }

    fn try_recv(&mut self, _: usize, into: &mut [u8]) -> std::result::Result<usize, Closed> {
        let begins = *self.begins.get_or_insert_with(|| Instant::now() + self.late);
        if Instant::now() < begins {
            return Ok(0);
        }
        if !self.announcement.is_empty() {
            let said: Vec<u8> = self.announcement.drain(..into.len()).collect();
            into.copy_from_slice(&said);
            return Ok(into.len());
        }
        if Instant::now() < self.due {
            return Ok(0);
        }
        let (len, pause) = (self.pieces)(self.sent);
        let len = len.min(into.len());
        into[..len].fill(0);
        self.sent += len as u64;
        self.due = Instant::now() + pause;
        Ok(len)
    }

    fn wait(&mut self, _: &[Wait], timeout: Duration) {
        std::thread::sleep(timeout.min(self.due.saturating_duration_since(Instant::now())));
    }

    fn spins(&self) -> u32 {
        10
    }
}

/// Supervisor that knows nothing of the other ranks. The second field is the time-out.
#[derive(Debug)]
struct Alone(Members, Duration);

impl Supervisor for Alone {
    fn begin(&self, _: Fingerprint) {}

    fn wait_for(&self, _: &[Wait]) {}

    fn end(&self) {}

    fn announce(&self, _: &str) {}

    fn failure(&self) -> Option<Cause> {
        None
    }

    fn ask(&self, _: Question) -> Option<Cause> {
        None
    }

    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &Members {
        &self.0
    }

    fn host(&self, _: usize) -> String {
        String::new()
    }

    fn timeout(&self) -> Duration {
        self.1
    }

    fn slow_warning(&self) -> Duration {
        self.1
    }
}

/// Runs an all-reduce of `bytes` bytes with a peer that sends `pieces`.
fn all_reduce(bytes: usize, timeout: Duration, pieces: fn(u64) -> (usize, Duration)) -> Result<()> {
    all_reduce_with(bytes, timeout, pieces, Duration::ZERO).0
}

/// The same with a peer that begins the call `late`. Returns the runner's statistics as well.
fn all_reduce_with(
    bytes: usize,
    timeout: Duration,
    pieces: fn(u64) -> (usize, Duration),
    late: Duration,
) -> (Result<()>, Stats) {
    let announcement = Vec::with_capacity(LEN);
    let peer = Peer { pieces, announcement, late, begins: None, sent: 0, due: Instant::now() };
    let supervisor = Arc::new(Alone(Members::world(2), timeout));
    let mut runner = OperationRunner::new(0, Topology::one_host(2), peer, supervisor);
    let operation = Operation::AllReduce {
        tensor: Tensor::zeros(bytes, DType::U8, &Device::Cpu).unwrap(),
        op: ReduceOp::Max,
    };
    let outcome = runner.run(&operation, &Before::of(&operation).unwrap());
    (outcome, runner.stats())
}

fn assert_late(outcome: Result<()>) {
    assert!(matches!(outcome, Err(Error::Timeout { rank: 1, .. })), "{outcome:?}");
}

const MS: Duration = Duration::from_millis(1);

/// Time spent on transferring data does not count as waiting.
#[test]
fn waiting_ends_when_the_peer_begins() {
    let slow = |_| (1000, 10 * MS);
    let run = |late| all_reduce_with(4000, 60_000 * MS, slow, late);
    let ((punctual, on_time), (late, waiting)) = (run(Duration::ZERO), run(50 * MS));
    punctual.unwrap();
    late.unwrap();
    assert_eq!(on_time.waited_ns, 0);
    // The peer's delay begins slightly before the executor starts to measure the waiting time.
    assert!(waiting.waited_ns >= 25_000_000, "{waiting:?}");
    let data = 30_000_000;
    assert!(on_time.busy_ns >= data && waiting.busy_ns >= waiting.waited_ns + data, "{waiting:?}");
}

#[test]
fn a_byte_now_and_then_is_no_progress() {
    assert_late(all_reduce(40_000, 300 * MS, |_| (1, MS)));
    assert_late(all_reduce(4_000, 300 * MS, |_| (1, 10 * MS)));
}

#[test]
fn much_data_may_take_longer_at_a_steady_pace() {
    all_reduce(12 << 20, 2000 * MS, |_| (64 << 10, 20 * MS)).unwrap();
}

#[test]
fn who_was_quick_at_first_has_no_more_time_in_the_end() {
    let total = 64 << 20;
    assert_late(all_reduce(total, 500 * MS, |sent| {
        if sent < (60 << 20) { (1 << 20, Duration::ZERO) } else { (1, MS) }
    }));
}
