//! Yielding the core for a moment before sleeping.
//!
//! With more ranks than cores, the peer waited for often needs nothing but a core. Yielding costs a fraction of a
//! microsecond, waking a sleeping rank costs several, and needs a system call of the peer for each message. But where
//! another program takes the core for its whole time slice, yielding delays what a wake-up would have brought at once.
//! So after a slow yield, a rank stops yielding for a number of waits.

use std::time::{Duration, Instant};

/// The most yields of one wait.
const MOST: u32 = 20;
/// A yield that took longer has given the core to a computing thread of another program.
const SLOW: Duration = Duration::from_micros(500);
/// Number of waits without a yield after a slow one.
const PAUSE: u32 = 2000;

/// Counts the yields of the current wait, and the remaining waits without yields.
#[derive(Default)]
pub(super) struct Yields {
    done: u32,
    pause: u32,
}

impl Yields {
    /// Begins a new wait.
    pub(super) fn reset(&mut self) {
        self.done = 0;
    }

    /// Makes no more yields in this wait.
    pub(super) fn skip(&mut self) {
        self.done = MOST;
    }

    /// Yields the core once. Returns false, without yielding, when it is time to sleep.
    pub(super) fn yield_once(&mut self) -> bool {
        if self.done == 0 && self.pause > 0 {
            self.pause -= 1;
            self.skip();
        }
        if self.done == MOST {
            return false;
        }
        self.done += 1;
        let before = Instant::now();
        std::thread::yield_now();
        self.record_time(before.elapsed());
        true
    }

    fn record_time(&mut self, time: Duration) {
        if time > SLOW {
            self.pause = PAUSE;
            self.skip();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_one_wait(yields: &mut Yields) -> u32 {
        yields.reset();
        let mut count = 0;
        while yields.yield_once() {
            count += 1;
            // The load of the machine is not what is tested.
            yields.pause = 0;
        }
        count
    }

    #[test]
    fn a_wait_comes_to_sleeping() {
        let mut yields = Yields::default();
        let count = in_one_wait(&mut yields);
        assert!((1..=MOST).contains(&count), "{count}");
        yields.reset();
        yields.skip();
        assert!(!yields.yield_once());
    }

    #[test]
    fn after_a_slow_yield_many_waits_make_none() {
        let mut yields = Yields::default();
        yields.record_time(SLOW * 2);
        for wait in 0..PAUSE {
            yields.reset();
            assert!(!yields.yield_once() && !yields.yield_once(), "wait {wait}");
        }
        yields.reset();
        assert!(yields.yield_once());
    }
}
