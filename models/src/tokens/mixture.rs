//! Even interleaving of several data sets in one epoch.

/// Data sets ("parts") of given lengths, merged so that any stretch of the epoch has them in proportion.
///
/// Element k of a part of m elements is at the fraction (k + 1/2) / m of the epoch.
#[derive(Debug, Clone)]
pub(super) struct Mixture {
    parts: Vec<u64>,
    total: u64,
}

impl Mixture {
    /// Merges parts of these lengths. `None` if the total overflows.
    pub(super) fn new(parts: Vec<u64>) -> Option<Self> {
        let total = parts.iter().try_fold(0u64, |total, part| total.checked_add(*part))?;
        Some(Self { parts, total })
    }

    pub(super) fn len(&self) -> u64 {
        self.total
    }

    /// Returns the part of the element at an index below [`len`](Self::len), and the element's index in that part.
    pub(super) fn at(&self, index: u64) -> (usize, u64) {
        if self.parts.len() == 1 {
            return (0, index);
        }
        // The epoch is divided into as many cells as there are elements; a part has at most one element in a cell.
        // Binary search for the cell.
        let (mut low, mut high) = (0, self.total);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.before(middle) <= index { low = middle } else { high = middle }
        }
        let mut left = index - self.before(low);
        for part in 0..self.parts.len() {
            let element = self.of_part(part, low);
            if self.of_part(part, low + 1) > element {
                if left == 0 {
                    return (part, element);
                }
                left -= 1;
            }
        }
        (0, 0) // Not reached: the cell `low` contains the element.
    }

    /// Returns the number of elements before a cell.
    fn before(&self, cell: u64) -> u64 {
        (0..self.parts.len()).map(|part| self.of_part(part, cell)).sum()
    }

    /// Returns the number of a part's elements before a cell: those with (2k + 1) total < 2 m cell.
    fn of_part(&self, part: usize, cell: u64) -> u64 {
        let m = u128::from(self.parts[part]);
        let odd = (2 * m * u128::from(cell)).saturating_sub(1) / u128::from(self.total);
        // 2k + 1 is at most `odd`.
        odd.div_ceil(2).min(m) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_element_comes_once_and_in_proportion() {
        for parts in
            [vec![5], vec![3, 3], vec![10, 1], vec![7, 0, 13, 2], vec![1, 1, 1, 1], vec![1000, 333, 1]]
        {
            let mixture = Mixture::new(parts.clone()).unwrap();
            let all: Vec<(usize, u64)> = (0..mixture.len()).map(|index| mixture.at(index)).collect();
            let mut counts = vec![0u64; parts.len()];
            for (place, &(part, element)) in all.iter().enumerate() {
                assert_eq!(element, counts[part], "{parts:?}, {place}");
                counts[part] += 1;
                let share = parts[part] as f64 / mixture.len() as f64;
                let expected = (place as f64 + 1.0) * share;
                assert!((counts[part] as f64 - expected).abs() <= 1.5, "{parts:?}, {place}");
            }
            assert_eq!(counts, parts);
        }
        assert!(Mixture::new(vec![u64::MAX, 1]).is_none());
        let large = Mixture::new(vec![1 << 62, 1 << 62]).unwrap();
        assert_eq!((large.at(0), large.at((1 << 63) - 1)), ((0, 0), (1, (1 << 62) - 1)));
    }
}
