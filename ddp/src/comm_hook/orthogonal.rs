//! Gram-Schmidt orthonormalisation in plain f64 arithmetic in a fixed order: equal matrices give bitwise equal results on
//! every machine.

/// SplitMix64 random number generator, for numbers in -1..1 that are the same on every machine.
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seeds: [u64; 3]) -> Self {
        let mut random = Self(0);
        for seed in seeds {
            random.0 ^= seed;
            random.0 = random.next_u64();
        }
        random
    }

    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(super) fn next(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Makes the columns of a matrix, given as the rows of its transpose, orthonormal: modified Gram-Schmidt, repeated as often
/// as rounding requires. A column that depends linearly on the previous ones, or contains an element that is not finite, is
/// replaced by a random one, so that the rank is always full. There must not be more columns than rows.
pub(super) fn orthonormalise(columns: &mut [Vec<f64>]) {
    for index in 0..columns.len() {
        let (done, rest) = columns.split_at_mut(index);
        let column = &mut rest[0];
        let mut attempt = 0;
        while !project_out(done, column) {
            attempt += 1;
            let mut random = Random::new([index as u64, attempt, column.len() as u64]);
            column.iter_mut().for_each(|element| *element = random.next());
        }
    }
}

/// Makes `column` a unit vector orthogonal to the others; returns false if it depends linearly on them.
fn project_out(others: &[Vec<f64>], column: &mut [f64]) -> bool {
    // Divides by the largest element first, so that squares neither overflow nor underflow.
    let largest = column.iter().fold(0f64, |largest, element| largest.max(element.abs()));
    if largest == 0.0 || !largest.is_finite() {
        return false;
    }
    column.iter_mut().for_each(|element| *element /= largest);
    normalise(column);
    loop {
        for other in others {
            let along = dot(other, column);
            column.iter_mut().zip(other).for_each(|(element, other)| *element -= along * other);
        }
        let left = normalise(column);
        if left < 1e-12 || left.is_nan() {
            return false;
        }
        if left > 0.5 {
            return true;
        }
    }
}

/// Divides by the norm, and returns it.
fn normalise(column: &mut [f64]) -> f64 {
    let norm = dot(column, column).sqrt();
    if norm > 0.0 {
        column.iter_mut().for_each(|element| *element /= norm);
    }
    norm
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assert_orthonormal(columns: &[Vec<f64>]) {
        for (i, left) in columns.iter().enumerate() {
            for (j, right) in columns.iter().enumerate() {
                let expected = f64::from(u8::from(i == j));
                assert!((dot(left, right) - expected).abs() < 1e-12, "{i}, {j}: {columns:?}");
            }
        }
    }

    #[test]
    fn dependent_and_empty_columns_are_replaced() {
        for columns in [
            vec![vec![0.0; 4]; 4],
            vec![vec![1.0; 4]; 3],
            vec![vec![1e-200; 3], vec![2e-200; 3]],
            vec![vec![1e200, 0.0], vec![1e200, 1e180]],
            vec![vec![1.0, 1.0, 1.0], vec![1.0, 1.0, 1.0 + 1e-15]],
            vec![vec![-3.0]],
        ] {
            let mut columns = columns;
            orthonormalise(&mut columns);
            assert_orthonormal(&columns);
        }
    }

    #[test]
    fn random_numbers_do_not_change_between_versions() {
        let mut random = Random(0);
        assert_eq!(random.next_u64(), 0xe220_a839_7b1d_cdaf);
        let draws: Vec<f64> = (0..1000).map(|_| random.next()).collect();
        assert!(draws.iter().all(|draw| (-1.0..1.0).contains(draw)));
        assert!(draws.iter().sum::<f64>().abs() < 100.0);
    }

    proptest! {
        #[test]
        fn the_span_is_kept(
            rows in 1usize..8,
            count in 1usize..8,
            seed in any::<u64>(),
        ) {
            let mut random = Random::new([seed, 0, 0]);
            let before: Vec<Vec<f64>> =
                (0..count.min(rows)).map(|_| (0..rows).map(|_| random.next()).collect()).collect();
            let mut after = before.clone();
            orthonormalise(&mut after);
            assert_orthonormal(&after);
            for column in &before {
                let mut left = column.clone();
                for unit in &after {
                    let along = dot(unit, column);
                    left.iter_mut().zip(unit).for_each(|(left, unit)| *left -= along * unit);
                }
                prop_assert!(dot(&left, &left).sqrt() < 1e-12);
            }
        }
    }
}
