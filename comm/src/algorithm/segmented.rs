//! Segmented schedules: one segment of the buffer after the other, each by the same algorithm. What a step has received
//! is then still in the processor's cache when the next one sends it. That pays through memory, but not over a network,
//! where more steps cost more latency.

use crate::algorithm::schedule::{Schedule, part};

/// Returns the schedule of a buffer of `len` elements, given a function from the length of a segment to its schedule.
/// Segments have at most `segment` elements, but at least 1.
///
/// # Cost
/// The bytes of the inner schedule, and its steps times the number of segments.
pub(crate) fn schedule(len: usize, segment: usize, inner: impl Fn(usize) -> Schedule) -> Schedule {
    let segments = len.div_ceil(segment.max(1)).max(1);
    let mut steps = Vec::new();
    for index in 0..segments {
        let place = part(len, segments, index);
        steps.append(&mut inner(place.len()).shifted(place.start).steps);
    }
    Schedule { steps }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ring_all_reduce;
    use crate::algorithm::simulate::{check_all_reduce, schedules};

    #[test]
    fn segments_sum_up_to_the_whole() {
        for world_size in 1..=5 {
            for (len, segment) in [(0, 3), (1, 3), (9, 3), (10, 3), (10, 0), (10, usize::MAX)] {
                let ring = |rank, len| ring_all_reduce::schedule(rank, world_size, len);
                let all = schedules(world_size, |rank| schedule(len, segment, |len| ring(rank, len)));
                check_all_reduce(&all, len);
            }
        }
    }

    #[test]
    fn steps_are_those_of_all_segments() {
        let schedule = schedule(100, 25, |len| ring_all_reduce::schedule(1, 5, len));
        assert_eq!((schedule.steps.len(), schedule.elements_sent()), (4 * 8, 2 * 4 * 100 / 5));
    }
}
