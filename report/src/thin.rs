//! Reduces the losses of many steps to few points.

/// Losses of some consecutive steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Bin {
    /// Middle of the steps, counted from 0.
    pub(super) step: f64,
    /// The smallest loss.
    pub(super) low: f64,
    /// The mean loss.
    pub(super) mean: f64,
    /// The largest loss.
    pub(super) high: f64,
}

/// Groups the steps into at most `most` bins of equal size, and splits these where a bin has no finite loss, which
/// leaves a gap in the curve. Other losses that are not finite are ignored.
pub(super) fn downsample(losses: &[f32], most: usize) -> Vec<Vec<Bin>> {
    let size = losses.len().div_ceil(most.max(1)).max(1);
    let mut pieces = vec![Vec::new()];
    for (index, chunk) in losses.chunks(size).enumerate() {
        match bin(index * size, chunk) {
            Some(bin) => pieces.last_mut().into_iter().for_each(|piece| piece.push(bin)),
            None => pieces.push(Vec::new()),
        }
    }
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

fn bin(start: usize, losses: &[f32]) -> Option<Bin> {
    let finite = || losses.iter().filter(|loss| loss.is_finite()).map(|&loss| f64::from(loss));
    let count = finite().count();
    (count > 0).then(|| Bin {
        step: start as f64 + (losses.len() - 1) as f64 / 2.,
        low: finite().fold(f64::INFINITY, f64::min),
        mean: finite().sum::<f64>() / count as f64,
        high: finite().fold(f64::NEG_INFINITY, f64::max),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_steps_stay_as_they_are() {
        let pieces = downsample(&[3., 2., 1.], 10);
        assert_eq!(pieces.len(), 1);
        assert_eq!(
            pieces[0].iter().map(|bin| (bin.step, bin.mean)).collect::<Vec<_>>(),
            [(0., 3.), (1., 2.), (2., 1.)]
        );
        assert!(pieces[0].iter().all(|bin| bin.low == bin.mean && bin.high == bin.mean));
    }

    #[test]
    fn many_become_few_and_keep_their_extremes() {
        let mut losses: Vec<f32> = (0..100_003).map(|step| step as f32).collect();
        losses[50_000] = -7.;
        let bins = downsample(&losses, 1000).concat();
        assert!(bins.len() <= 1000 && bins.len() > 900);
        assert_eq!(bins.iter().map(|bin| bin.low).fold(0., f64::min), -7.);
        assert_eq!(bins.iter().map(|bin| bin.high).fold(0., f64::max), 100_002.);
    }

    #[test]
    fn what_is_not_finite_leaves_a_gap() {
        let pieces = downsample(&[1., f32::NAN, f32::INFINITY, 2., 3.], 10);
        assert_eq!(pieces.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2]);
        let pieces = downsample(&[1., f32::NAN, 3., 5.], 2);
        assert_eq!(pieces.concat().iter().map(|bin| bin.mean).collect::<Vec<_>>(), [1., 4.]);
        assert!(
            downsample(&[f32::NAN], 10).is_empty()
                && downsample(&[], 10).is_empty()
                && downsample(&[], 0).is_empty()
        );
    }
}
