//! Stopping a run early, with a checkpoint: a request that reaches any rank is agreed upon by all, between two steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp, Result, all_gather_object};

/// The cause of a request that no signal made. Signals have smaller numbers.
const BY_PROGRAM: u32 = 1 << 16;
/// How often the ranks ask each other: after each step that takes longer, and of shorter ones after several.
const PERIOD: Duration = Duration::from_millis(20);
/// Steps between two checks, however short they are.
const MOST_STEPS: usize = 128;
/// How long an elastic run waits for a request to reach all ranks, before those that it has reached leave.
const SETTLE_TIME: Duration = Duration::from_secs(1);

/// A request to stop a run after the step in work, with a checkpoint. Clones share it. One rank's request stops all ranks.
///
/// ```
/// use girandole::trainer::{StopFlag, TrainConfig};
///
/// let flag = StopFlag::default();
/// let config = TrainConfig { stop: Some(flag.clone()), ..TrainConfig::default() };
/// flag.request(); // in earnest, from a signal handler, an observer or another thread
/// assert!(config.stop.is_some_and(|flag| flag.is_requested()));
/// ```
#[derive(Clone, Default)]
pub struct StopFlag(Arc<AtomicU32>);

impl StopFlag {
    /// Asks the run to stop.
    pub fn request(&self) {
        self.request_for(BY_PROGRAM);
    }

    /// Asks the run to stop because of a signal, which [`Error::Stopped`](crate::Error::Stopped) then names. May be called
    /// in a signal handler.
    pub fn request_by(&self, signal: i32) {
        self.request_for(u32::try_from(signal).unwrap_or(BY_PROGRAM).clamp(1, BY_PROGRAM));
    }

    fn request_for(&self, cause: u32) {
        // The first cause counts.
        let _ = self.0.compare_exchange(0, cause, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Whether this process has been asked to stop.
    pub fn is_requested(&self) -> bool {
        self.cause() > 0
    }

    pub(super) fn cause(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// Two flags are equal if they are clones of one.
impl PartialEq for StopFlag {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Without its state, which differs between ranks.
impl std::fmt::Debug for StopFlag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StopFlag")
    }
}

/// The signal of a cause; `None` if the program asked.
pub(super) fn signal_of(cause: u32) -> Option<i32> {
    i32::try_from(cause).ok().filter(|_| cause < BY_PROGRAM)
}

/// What the ranks have agreed upon: all write a checkpoint now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stop {
    /// The signal that asked for it, on some rank; `None` if the program did.
    pub signal: Option<i32>,
    /// Whether this rank ends after that. In an elastic run the others may go on.
    pub leaves: bool,
}

/// Asks, between steps, whether any rank was asked to stop.
///
/// # Cost
/// An all-reduce of 8 bytes, at most every 20 ms or after a step that takes longer.
pub struct StopCheck {
    flag: StopFlag,
    comm: Arc<dyn Communicator>,
    /// Fewest ranks that may go on without the others, in an elastic run.
    fewest: Option<usize>,
    /// Steps until the next check, and from the last one to that.
    left: usize,
    steps: usize,
    checked: Option<Instant>,
    /// Since when this rank has waited for the request to reach all.
    waits: Option<Instant>,
}

impl StopCheck {
    /// Creates the check for the ranks of `comm`. In an elastic run, `fewest` ranks or more may go on without those that are
    /// asked to stop.
    pub fn new(flag: StopFlag, comm: Arc<dyn Communicator>, fewest: Option<usize>) -> Self {
        Self { flag, comm, fewest, left: 0, steps: 0, checked: None, waits: None }
    }

    /// Returns the same check for another group. Call on every rank of it.
    #[must_use]
    pub fn regrouped(&self, comm: Arc<dyn Communicator>) -> Self {
        Self::new(self.flag.clone(), comm, self.fewest)
    }

    /// Waits until all ranks have come so far.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn wait_for_all(&self) -> Result<()> {
        self.comm.run(Operation::Barrier)
    }

    /// Returns what to do before the next step; `None` to go on. Every rank must call it before each step.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn decide(&mut self) -> Result<Option<Stop>> {
        if self.left > 0 {
            self.left -= 1;
            return Ok(None);
        }
        let (cause, step_us) = self.exchange()?;
        self.plan_next(step_us);
        if cause == 0 {
            return Ok(None);
        }
        // Asked for every step from now on.
        (self.left, self.steps) = (0, 0);
        let leaves = match self.fewest {
            None => true,
            Some(fewest) => match self.who_leaves(fewest)? {
                Some(leaves) => leaves,
                None => return Ok(None),
            },
        };
        if leaves {
            // If a rank is lost before all have ended, the others still know.
            self.flag.request_for(cause);
        }
        Ok(Some(Stop { signal: signal_of(cause), leaves }))
    }

    /// Returns the cause of the request, 0 if there is none, and the microseconds of a step, the most of any rank.
    fn exchange(&mut self) -> Result<(u32, u32)> {
        let since = self.checked.replace(Instant::now());
        let us = since.map(|since| since.elapsed().as_micros() / (self.steps as u128 + 1));
        // At first nothing is known: then the next step is checked, too.
        let us = us.and_then(|us| u32::try_from(us).ok()).unwrap_or(u32::MAX);
        if self.comm.world_size() == 1 {
            return Ok((self.flag.cause(), us));
        }
        let most = Tensor::new(&[self.flag.cause(), us], &Device::Cpu).map_err(comm::Error::from)?;
        self.comm.run(Operation::AllReduce { tensor: most.clone(), op: ReduceOp::Max })?;
        let most = most.to_vec1::<u32>().map_err(comm::Error::from)?;
        Ok((most[0], most[1]))
    }

    /// Sets the number of steps until the next check, the same on all ranks. It grows slowly, because a step may take longer
    /// than the one before.
    fn plan_next(&mut self, step_us: u32) {
        let steps = PERIOD.as_micros() as usize / (step_us as usize).max(1);
        self.steps = steps.min(MOST_STEPS).min(2 * self.steps + 1);
        self.left = self.steps;
    }

    /// In an elastic run: returns whether this rank leaves, once the request has reached all ranks, or has not reached some
    /// for a while; these go on if they are enough. `None`: not yet.
    fn who_leaves(&mut self, fewest: usize) -> Result<Option<bool>> {
        let waited = self.waits.get_or_insert_with(Instant::now).elapsed() >= SETTLE_TIME;
        let own = (self.flag.is_requested(), waited);
        let all: Vec<(bool, bool)> = all_gather_object(&*self.comm, &own)?;
        let not_asked = all.iter().filter(|(is_asked, _)| !is_asked).count();
        Ok(match not_asked {
            0 => Some(true),
            _ if all.iter().all(|(_, waited)| !waited) => None,
            some if some >= fewest => Some(own.0),
            _ => Some(true),
        })
    }
}

impl std::fmt::Debug for StopCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StopCheck").field("flag", &self.flag).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use comm::Local;

    use super::*;

    /// Returns after how many steps each of three ranks stops, if rank 1 is asked to after this number.
    fn stopped_after(asked: usize, fewest: Option<usize>, at_all: bool) -> Vec<(usize, Stop)> {
        let stopped = Local::run_shared(3, |comm| {
            let (flag, rank) = (StopFlag::default(), comm.rank());
            let mut check = StopCheck::new(flag.clone(), comm, fewest);
            for step in 0.. {
                if step == asked && (at_all || rank == 1) {
                    flag.request_by(15 + i32::from(rank == 2));
                }
                if let Some(stop) = check.decide()? {
                    return Ok((step, stop));
                }
            }
            unreachable!("the steps have no end")
        });
        stopped.unwrap()
    }

    #[test]
    fn all_ranks_stop_at_the_same_step_and_soon() {
        for asked in [0, 1, 7, 1000] {
            let stopped = stopped_after(asked, None, false);
            let (step, stop) = stopped[1];
            assert_eq!(stop, Stop { signal: Some(15), leaves: true });
            assert!(stopped.iter().all(|other| *other == (step, stop)), "{stopped:?}");
            assert!((asked..=asked + MOST_STEPS + 1).contains(&step), "asked at {asked}, stopped at {step}");
        }
    }

    #[test]
    fn in_an_elastic_run_the_others_go_on_if_they_are_enough() {
        let leave = |fewest, at_all| {
            let stopped = stopped_after(3, Some(fewest), at_all);
            assert!(stopped.iter().all(|(step, _)| *step == stopped[0].0), "{stopped:?}");
            stopped.into_iter().map(|(_, stop)| stop.leaves).collect::<Vec<_>>()
        };
        assert_eq!(leave(2, false), [false, true, false]);
        assert_eq!(leave(3, false), [true; 3]);
        assert_eq!(leave(1, true), [true; 3]);
    }

    #[test]
    fn the_first_cause_counts() {
        let flag = StopFlag::default();
        assert!(!flag.is_requested());
        flag.request_by(10);
        flag.request();
        assert_eq!(flag.clone().cause(), 10);
        assert!(flag == flag.clone() && flag != StopFlag::default());
    }
}
