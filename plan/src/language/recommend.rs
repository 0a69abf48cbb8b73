//! Recommendation of a layout, with reasons.

use girandole::Layout;

use super::{LayoutComparison, LayoutCost};
use crate::units::{show_bytes, show_time};

/// Layouts within this factor of the fastest count as equally fast; the simplest of them is recommended.
const EQUAL_SPEED_FACTOR: f64 = 1.02;

/// Returns the index of the fastest layout that fits into `memory` bytes per rank, or of the simplest one that is about
/// as fast.
pub(super) fn recommended(compared: &LayoutComparison, seconds: &[f64], memory: f64) -> Option<usize> {
    let fits = |place: &usize| compared.costs[*place].most().total() <= memory;
    let fitting: Vec<usize> = (0..compared.costs.len()).filter(fits).collect();
    let quickest = fitting.iter().map(|place| seconds[*place]).min_by(f64::total_cmp)?;
    let close = fitting.into_iter().filter(|place| seconds[*place] <= quickest * EQUAL_SPEED_FACTOR);
    close.min_by_key(|place| complexity(&compared.costs[*place].layout))
}

/// Ranks layouts by complexity: fewer axes are simpler; then replicas are simpler than shards, shards than tensor
/// parallelism, and this than stages.
fn complexity(layout: &Layout) -> (usize, [bool; 4]) {
    let Layout { pp, dp, shard, tp, .. } = *layout;
    let more = [pp > 1, tp > 1, shard > 1, dp > 1];
    (more.iter().filter(|more| **more).count(), more)
}

/// Returns the recommendation as a line, with reasons.
pub(super) fn line(compared: &LayoutComparison, seconds: &[f64], memory: f64) -> Option<String> {
    let best = recommended(compared, seconds, memory)?;
    let name = |place: usize| compared.costs[place].layout.to_string();
    let fits = |place: &usize| compared.costs[*place].most().total() <= memory;
    let others = || (0..compared.costs.len()).filter(|place| *place != best);
    let by_time = |a: &usize, b: &usize| seconds[*a].total_cmp(&seconds[*b]);
    let mut reasons = Vec::new();
    if others().next().is_none() {
        reasons.push(format!("{} a step, and it is the only layout", show_time(seconds[best])));
    } else if let Some(next) = others().filter(fits).min_by(by_time) {
        let what = if seconds[next] < seconds[best] { "as quick as, and simpler than," } else { "before" };
        let (own, next_time) = (show_time(seconds[best]), show_time(seconds[next]));
        reasons.push(format!("{own} a step, {what} {} ({next_time})", name(next)));
    } else {
        reasons.push(format!("{} a step, and nothing else fits", show_time(seconds[best])));
    }
    let quicker = others().filter(|place| seconds[*place] < seconds[best] && !fits(place)).min_by(by_time);
    if let Some(other) = quicker {
        let needed = show_bytes(of(&compared.costs[other]));
        reasons.push(format!(
            "{} would be quicker, but needs {needed} of {}",
            name(other),
            show_bytes(memory)
        ));
    }
    Some(format!("recommended: --mesh {}: {}", name(best), reasons.join("; ")))
}

fn of(cost: &LayoutCost) -> f64 {
    cost.most().total()
}

#[cfg(test)]
mod tests {
    use super::super::{Memory, StageCost};
    use super::*;

    fn compared(layouts: &[(&str, f64)]) -> LayoutComparison {
        let cost = |(layout, parameters): &(&str, f64)| {
            let memory = Memory { parameters: *parameters, ..Memory::default() };
            let stages = vec![StageCost { stage: 0, memory, sent: 0.0 }];
            LayoutCost { layout: layout.parse().unwrap(), stages }
        };
        LayoutComparison { costs: layouts.iter().map(cost).collect(), ..LayoutComparison::default() }
    }

    #[test]
    fn the_quickest_that_fits_is_taken_or_a_simpler_one() {
        let all = compared(&[("pp=4", 1e9), ("shard=2,tp=2", 2e9), ("tp=4", 3e9), ("dp=4", 9e9)]);
        let line = |seconds: &[f64], memory| line(&all, seconds, memory);
        let quick = [3.0, 1.0, 2.0, 0.5];
        assert_eq!(
            line(&quick, 4e9).unwrap(),
            "recommended: --mesh shard=2,tp=2: 1.00 s a step, before tp=4 (2.00 s); dp=4 would be quicker, but needs 9.00 GB of 4.00 GB"
        );
        assert!(line(&quick, 9e9).unwrap().starts_with("recommended: --mesh dp=4: "));
        let near = line(&[3.0, 1.0, 1.01, 5.0], 4e9).unwrap();
        assert_eq!(
            near,
            "recommended: --mesh tp=4: 1.01 s a step, as quick as, and simpler than, shard=2,tp=2 (1.00 s)"
        );
        assert!(line(&quick, 1e9).unwrap().contains("nothing else fits; dp=4 would be quicker"));
        assert_eq!(line(&quick, 1e8), None);
    }
}
