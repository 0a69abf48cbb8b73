//! Breakdown of a rank's time into computing, communicating, and waiting for other ranks.

use serde::{Deserialize, Serialize};

use crate::clock::Interval;

/// Seconds of a rank, by activity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct TimeSplit {
    /// The rank computes, whether or not data is sent meanwhile.
    pub compute_s: f64,
    /// The rank is blocked, and all other ranks are, too.
    pub communication_s: f64,
    /// The rank is blocked, and some other rank computes.
    pub waiting_s: f64,
}

/// Returns the split of each rank from `began` to `ended`; `ranks` has each rank's blocked intervals, disjoint and in
/// order.
pub(crate) fn split(ranks: &[Vec<Interval>], (began, ended): Interval) -> Vec<TimeSplit> {
    // Changes of state: the moment, the rank, and whether it stops computing (true) or starts again (false).
    let mut turns: Vec<(u64, usize, bool)> = Vec::new();
    for (rank, intervals) in ranks.iter().enumerate() {
        let within =
            intervals.iter().map(|(start, end)| (start.clamp(&began, &ended), end.clamp(&began, &ended)));
        for (&start, &end) in within.filter(|(start, end)| start < end) {
            turns.push((start, rank, true));
            turns.push((end, rank, false));
        }
    }
    // At the same moment, starting again sorts before stopping.
    turns.sort_unstable();
    let mut splits = vec![TimeSplit::default(); ranks.len()];
    let (mut blocked, mut last) = (vec![false; ranks.len()], began);
    for (moment, rank, stops) in turns.into_iter().chain([(ended, ranks.len(), false)]) {
        let seconds = (moment - last) as f64 * 1e-9;
        let all = blocked.iter().all(|blocked| *blocked);
        for (split, blocked) in splits.iter_mut().zip(&blocked) {
            *match (blocked, all) {
                (false, _) => &mut split.compute_s,
                (true, true) => &mut split.communication_s,
                (true, false) => &mut split.waiting_s,
            } += seconds;
        }
        if let Some(blocked) = blocked.get_mut(rank) {
            *blocked = stops;
        }
        last = moment;
    }
    splits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(split: &TimeSplit) -> [u64; 3] {
        [split.compute_s, split.communication_s, split.waiting_s].map(|s| (s * 1e9).round() as u64)
    }

    #[test]
    fn every_moment_counts_once() {
        let ranks = [vec![(10, 30), (50, 60)], vec![(20, 40)]];
        let splits: Vec<[u64; 3]> = split(&ranks, (0, 100)).iter().map(seconds).collect();
        // Rank 0 waits from 10 to 20 and from 50 to 60, rank 1 from 30 to 40; both communicate from 20 to 30.
        assert_eq!(splits, [[70, 10, 20], [80, 10, 10]]);
    }

    #[test]
    fn what_lies_outside_does_not_count() {
        let splits = split(&[vec![(0, 15), (90, 200)], vec![]], (10, 100));
        assert_eq!(splits.iter().map(seconds).collect::<Vec<_>>(), [[75, 0, 15], [90, 0, 0]]);
        assert_eq!(seconds(&split(&[vec![(2, 6)]], (0, 10))[0]), [6, 4, 0]);
        assert_eq!(split(&[], (0, 10)), []);
    }

    #[test]
    fn one_interval_right_after_another_is_one() {
        let splits = split(&[vec![(10, 20), (20, 30)], vec![(0, 100)]], (0, 100));
        assert_eq!(seconds(&splits[0]), [80, 20, 0]);
    }
}
