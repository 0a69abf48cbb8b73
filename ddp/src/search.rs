//! Bucket size search: tries several sizes in the first steps.

use std::time::Duration;

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp};

use crate::Result;
use crate::bucket_plan::{Item, Plan};

/// Steps per size. The first of them is not measured, because it allocates new buckets.
const STEPS: usize = 4;

/// Search among bucket sizes, the same on every rank.
#[derive(Debug)]
pub(crate) struct Search {
    candidates: Vec<Candidate>,
    /// Index of the candidate that is being tried.
    now: usize,
    steps: usize,
}

#[derive(Debug)]
struct Candidate {
    bytes: usize,
    plan: Plan,
    quickest: Duration,
}

impl Search {
    /// Creates a search among the configured size and powers of 4; `None` if all result in the same buckets.
    pub(crate) fn new(items: &[Item], order: &[usize], first_bytes: usize, bytes: usize) -> Option<Self> {
        let mut candidates: Vec<Candidate> = Vec::new();
        for bytes in [bytes].into_iter().chain((8..=14).map(|power| 1 << (2 * power))) {
            let plan = Plan::new(items, order, first_bytes.min(bytes), bytes);
            if candidates.iter().all(|known| known.plan != plan) {
                candidates.push(Candidate { bytes, plan, quickest: Duration::MAX });
            }
        }
        (candidates.len() > 1).then_some(Self { candidates, now: 0, steps: 0 })
    }

    /// Returns the buckets to try now.
    pub(crate) fn plan(&self) -> Plan {
        self.candidates[self.now].plan.clone()
    }

    /// Records how long a step took on this rank; `None` if it had no data. Returns true when the current size is done.
    pub(crate) fn note(&mut self, time: Option<Duration>) -> bool {
        self.steps += 1;
        if let Some(time) = time.filter(|_| self.steps > 1) {
            let quickest = &mut self.candidates[self.now].quickest;
            *quickest = time.min(*quickest);
        }
        let is_over = self.steps == STEPS;
        if is_over {
            (self.now, self.steps) = (self.now + 1, 0);
        }
        is_over
    }

    /// Returns true when all sizes have been tried.
    pub(crate) fn is_over(&self) -> bool {
        self.now == self.candidates.len()
    }

    /// Returns the size for which the slowest rank is fastest, and its buckets.
    pub(crate) fn choose(self, comm: &dyn Communicator) -> Result<(usize, Plan)> {
        let seconds = self.candidates.iter().map(|candidate| match candidate.quickest {
            // This rank had no data in these steps.
            Duration::MAX => 0.0,
            quickest => quickest.as_secs_f64(),
        });
        let times = Tensor::from_iter(seconds, &Device::Cpu)?;
        comm.run(Operation::AllReduce { tensor: times.clone(), op: ReduceOp::Max })?;
        let times = times.to_vec1::<f64>()?;
        let mut chosen = self.candidates.into_iter().zip(times);
        let (mut best, mut best_time) = match chosen.next() {
            Some(first) => first,
            None => return Ok((0, Plan::default())),
        };
        for (candidate, time) in chosen {
            if time < best_time {
                (best, best_time) = (candidate, time);
            }
        }
        tracing::info!("buckets of {} bytes: {best_time:.6} s a step", best.bytes);
        Ok((best.bytes, best.plan))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm::Local;

    fn items(count: usize) -> (Vec<Item>, Vec<usize>) {
        (
            vec![Item { elements: 1 << 16, bytes: 1 << 18, kind: 0, group: 0 }; count],
            (0..count).rev().collect(),
        )
    }

    #[test]
    fn sizes_that_come_to_the_same_are_tried_once() {
        let (few, order) = items(1);
        assert!(Search::new(&few, &order, 1 << 20, 25 << 20).is_none());
        assert!(Search::new(&[], &[], 1 << 20, 25 << 20).is_none());
        let (many, order) = items(40);
        let search = Search::new(&many, &order, 1 << 20, 25 << 20).expect("a choice");
        let bytes: Vec<usize> = search.candidates.iter().map(|candidate| candidate.bytes).collect();
        // 10 MiB in all, so a limit above 16 MiB gives the same buckets as 25 MiB.
        assert_eq!(bytes, [25 << 20, 1 << 16, 1 << 20, 1 << 22]);
    }

    /// Returns what three ranks choose, given the milliseconds that each takes for each size.
    fn choice(times: [[u64; 4]; 3]) -> Vec<usize> {
        let chosen = Local::run(3, |comm| {
            let (items, order) = items(40);
            let mut search = Search::new(&items, &order, 1 << 20, 25 << 20).expect("a choice");
            while !search.is_over() {
                let time = times[comm.rank()][search.now];
                // The first step is always slow, and others may be.
                let time = if search.steps == 0 { 1 } else { time + search.steps as u64 % 3 };
                search.note((time > 1).then(|| Duration::from_millis(time)));
            }
            Ok(search.choose(comm)?.0)
        });
        chosen.expect("no failure")
    }

    #[test]
    fn the_slowest_rank_decides_for_all() {
        assert_eq!(choice([[22, 30, 5, 20], [22, 30, 15, 10], [22, 30, 25, 11]]), [1 << 22; 3]);
        assert_eq!(choice([[20; 4], [20; 4], [20; 4]]), [25 << 20; 3]);
    }
}
