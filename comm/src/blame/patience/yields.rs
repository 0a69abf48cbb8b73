//! Giving the core away for a moment before going to sleep.
//!
//! Where there are more ranks than cores, the peer that is waited for often needs nothing but a core. Yielding costs a fraction of
//! a microsecond, waking a sleeping rank up costs several, and needs a system call of the peer's for each message. Where another
//! program takes the core for its whole time slice, though, yielding delays what a wake-up would have brought at once, so that
//! ranks stop doing it for a while.

use std::time::{Duration, Instant};

/// Yields of one wait.
const MOST: u32 = 20;
/// A yield that took longer has given the core to somebody who computes.
const SLOW: Duration = Duration::from_micros(500);
/// Waits without a yield after a slow one.
const PAUSE: u32 = 2000;

/// Counts the yields of one wait, and the waits that make none.
#[derive(Default)]
pub(super) struct Yields {
    done: u32,
    pause: u32,
}

impl Yields {
    /// A new wait begins.
    pub(super) fn reset(&mut self) {
        self.done = 0;
    }

    /// The rest of this wait makes none.
    pub(super) fn skip(&mut self) {
        self.done = MOST;
    }

    /// Gives the core away for a moment; false where it is time to sleep.
    pub(super) fn give_way(&mut self) -> bool {
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
        self.took(before.elapsed());
        true
    }

    fn took(&mut self, time: Duration) {
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
        while yields.give_way() {
            count += 1;
            // What the machine does beside is not what is tested.
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
        assert!(!yields.give_way());
    }

    #[test]
    fn after_a_slow_yield_many_waits_make_none() {
        let mut yields = Yields::default();
        yields.took(SLOW * 2);
        for wait in 0..PAUSE {
            yields.reset();
            assert!(!yields.give_way() && !yields.give_way(), "wait {wait}");
        }
        yields.reset();
        assert!(yields.give_way());
    }
}
