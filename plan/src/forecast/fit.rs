//! Fits a network's parameters to measurements of `comm-bench`.

use serde::{Deserialize, Serialize};

use super::{Collective, Collectives, Group, Link, Network};
use crate::measure::Row;

/// Network parameters that fit the measurements best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Fit {
    /// Link between two ranks.
    pub link: Link,
    /// Seconds that a rank takes to reduce or copy a byte.
    pub combine_s_per_byte: f64,
    /// Measured and fitted time of each row.
    pub rows: Vec<FittedRow>,
}

/// Measured and fitted time of a row of `comm-bench`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FittedRow {
    /// Name of the operation.
    pub op: String,
    /// Number of ranks.
    pub world: usize,
    /// Size of the buffer in bytes.
    pub bytes: usize,
    /// Measured seconds.
    pub measured_s: f64,
    /// Fitted seconds.
    pub fitted_s: f64,
}

/// Fits latency, time per byte and time to reduce a byte, none of them negative, by least squares of the relative
/// errors of the schedules' times. `None` if no row has a schedule.
///
/// ```
/// use plan::forecast::fit::fit;
/// use plan::measure::{Measured, Row};
///
/// let row = |bytes, s| Row::new(Measured::SendRecv, 2, bytes, (s, 1));
/// let fit = fit(&[row(4000, 1e-5 + 4e-6), row(4_000_000, 1e-5 + 4e-3)]).ok_or("no rows")?;
/// assert!((fit.link.latency - 1e-5).abs() < 1e-9 && (fit.link.s_per_byte - 1e-9).abs() < 1e-13);
/// # Ok::<(), &str>(())
/// ```
pub fn fit(rows: &[Row]) -> Option<Fit> {
    let known: Vec<(&Row, [f64; 3])> = rows
        .iter()
        .filter(|row| row.world > 1 && row.s > 0.0)
        .filter_map(|row| Some((row, costs(Collective::named(&row.op)?, row.world, row.bytes))))
        .collect();
    if known.is_empty() {
        return None;
    }
    let weighted: Vec<[f64; 3]> = known.iter().map(|(row, costs)| costs.map(|cost| cost / row.s)).collect();
    let [latency, s_per_byte, combine_s_per_byte] = solve(&weighted);
    let rows = known.iter().map(|(row, costs)| FittedRow {
        op: row.op.clone(),
        world: row.world,
        bytes: row.bytes,
        measured_s: row.s,
        fitted_s: costs[0] * latency + costs[1] * s_per_byte + costs[2] * combine_s_per_byte,
    });
    Some(Fit { link: Link { latency, s_per_byte }, combine_s_per_byte, rows: rows.collect() })
}

/// Returns how often each of the three parameters counts in the time of a schedule.
fn costs(collective: Collective, ranks: usize, bytes: usize) -> [f64; 3] {
    let only = |latency, s_per_byte, combine| {
        let network = Network::one_node("unit", Link { latency, s_per_byte }, combine, false);
        Collectives::new(&network).seconds(collective, Group { ranks, stride: 1 }, bytes)
    };
    [only(1.0, 0.0, 0.0), only(0.0, 1.0, 0.0), only(0.0, 0.0, 1.0)]
}

/// Non-negative least squares of `row . x = 1`: tries every choice of which unknowns are 0, and returns the best valid
/// solution.
fn solve(rows: &[[f64; 3]]) -> [f64; 3] {
    let error = |x: &[f64; 3]| -> f64 {
        rows.iter().map(|row| (row.iter().zip(x).map(|(a, x)| a * x).sum::<f64>() - 1.0).powi(2)).sum()
    };
    let choices = (1u8..8).map(|choice| [0, 1, 2].map(|index| choice >> index & 1 == 1));
    let solutions = choices.filter_map(|used| least_squares(rows, used));
    let allowed = solutions.filter(|x| x.iter().all(|value| value.is_finite() && *value >= 0.0));
    allowed.min_by(|a, b| error(a).total_cmp(&error(b))).unwrap_or_default()
}

/// Solves the normal equations of the used unknowns, by elimination; `None` if there is no unique solution.
fn least_squares(rows: &[[f64; 3]], used: [bool; 3]) -> Option<[f64; 3]> {
    let places: Vec<usize> = (0..3).filter(|place| used[*place]).collect();
    // Scaled, because the unknowns differ by nine orders of magnitude.
    let scale = [0, 1, 2].map(|place| rows.iter().map(|row| row[place]).fold(0.0, f64::max));
    if places.iter().any(|place| scale[*place] <= 0.0) {
        return None;
    }
    let at = |row: &[f64; 3], place: usize| row[place] / scale[place];
    let mut matrix: Vec<Vec<f64>> = places
        .iter()
        .map(|one| {
            let products =
                places.iter().map(|other| rows.iter().map(|row| at(row, *one) * at(row, *other)).sum());
            products.chain([rows.iter().map(|row| at(row, *one)).sum()]).collect()
        })
        .collect();
    let size = places.len();
    for pivot in 0..size {
        let best =
            (pivot..size).max_by(|a, b| matrix[*a][pivot].abs().total_cmp(&matrix[*b][pivot].abs()))?;
        matrix.swap(pivot, best);
        let head = matrix[pivot][pivot];
        if head.abs() < 1e-12 {
            return None;
        }
        let own: Vec<f64> = matrix[pivot].iter().map(|value| value / head).collect();
        for (index, line) in matrix.iter_mut().enumerate() {
            let factor = line[pivot];
            match index == pivot {
                true => line.clone_from(&own),
                false => line.iter_mut().zip(&own).for_each(|(value, own)| *value -= factor * own),
            }
        }
    }
    let mut solution = [0.0; 3];
    for (line, place) in matrix.iter().zip(&places) {
        solution[*place] = line[size] / scale[*place];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::Measured;

    fn rows(link: Link, combine: f64) -> Vec<Row> {
        let network = Network::one_node("test", link, combine, false);
        let mut collectives = Collectives::new(&network);
        let mut rows = Vec::new();
        for op in [Measured::AllReduce, Measured::AllGather, Measured::ReduceScatter, Measured::SendRecv] {
            for (world, bytes) in [(2, 4096), (2, 1 << 20), (4, 1 << 20), (4, 16 << 20)] {
                let group = Group { ranks: world, stride: 1 };
                let s = collectives.seconds(Collective::named(op.name()).unwrap(), group, bytes);
                rows.push(Row::new(op, world, bytes, (s, 1)));
            }
        }
        rows
    }

    #[test]
    fn what_made_the_times_is_found() {
        for (latency, s_per_byte, combine) in [(5e-6, 1e-10, 5e-11), (1e-4, 1e-9, 0.0), (0.0, 1e-9, 1e-9)] {
            let fit = fit(&rows(Link { latency, s_per_byte }, combine)).unwrap();
            for row in &fit.rows {
                assert!((row.fitted_s / row.measured_s - 1.0).abs() < 0.02, "{row:?}");
            }
            assert!((fit.link.s_per_byte - s_per_byte).abs() <= 0.02 * s_per_byte, "{fit:?}");
            assert!((fit.link.latency - latency).abs() <= 0.05 * latency + 1e-9, "{fit:?}");
        }
    }

    #[test]
    fn without_rows_there_is_none() {
        assert_eq!(fit(&[]), None);
        let other = Row::new(Measured::Gather, 2, 4, (1.0, 1));
        assert_eq!(fit(&[other]), None);
    }
}
