//! Tests of PowerSGD against the paper's algorithm.

use super::*;
use candle_core::Device;
use comm::{Communicator, Local};

const N: usize = 6;
const M: usize = 5;
const RANK: usize = 2;

type Grid = Vec<Vec<f64>>;

fn grid(rows: usize, cols: usize, at: impl Fn(usize, usize) -> f64) -> Grid {
    (0..rows).map(|row| (0..cols).map(|col| at(row, col)).collect()).collect()
}

fn gradient(rank: usize, step: usize) -> Grid {
    let mut random = Random::new([7, rank as u64, step as u64]);
    let draws: Vec<f64> = (0..N * M).map(|_| random.next()).collect();
    grid(N, M, |row, col| draws[row * M + col])
}

fn mean(grids: &[Grid]) -> Grid {
    let (rows, cols) = (grids[0].len(), grids[0][0].len());
    grid(rows, cols, |row, col| grids.iter().map(|g| g[row][col]).sum::<f64>() / grids.len() as f64)
}

fn times(left: &Grid, right: &Grid) -> Grid {
    grid(left.len(), right[0].len(), |row, col| (0..right.len()).map(|k| left[row][k] * right[k][col]).sum())
}

fn transposed(grid_: &Grid) -> Grid {
    grid(grid_[0].len(), grid_.len(), |row, col| grid_[col][row])
}

/// Textbook Gram-Schmidt for two columns.
fn gram_schmidt(columns: &Grid) -> Grid {
    let dot = |left: &[f64], right: &[f64]| left.iter().zip(right).map(|(l, r)| l * r).sum::<f64>();
    let unit = |column: &[f64]| -> Vec<f64> {
        column.iter().map(|element| element / dot(column, column).sqrt()).collect()
    };
    let columns = transposed(columns);
    let first = unit(&columns[0]);
    let along = dot(&first, &columns[1]);
    let second: Vec<f64> = columns[1].iter().zip(&first).map(|(c, f)| c - along * f).collect();
    transposed(&vec![first.clone(), unit(&second)])
}

/// Runs the paper's algorithm on the gradients of all ranks, and returns the result of each step.
fn reference(ranks: usize, steps: usize, config: &PowerSgdConfig) -> Vec<Grid> {
    let start = |step: usize| {
        let mut random = Random::new([config.seed, 3, step as u64]);
        let draws: Vec<f64> = (0..M * RANK).map(|_| random.next()).collect();
        grid(M, RANK, |row, col| draws[row * RANK + col])
    };
    let mut right = start(0);
    let mut errors = vec![grid(N, M, |_, _| 0.0); ranks];
    let mut results = vec![];
    for step in 0..steps {
        let with_error = |rank: usize| {
            let gradient = gradient(rank, step);
            grid(N, M, |row, col| gradient[row][col] + errors[rank][row][col])
        };
        let all: Vec<Grid> = (0..ranks).map(with_error).collect();
        if !config.warm_start {
            right = start(step);
        }
        let left = gram_schmidt(&times(&mean(&all), &right));
        right = times(&transposed(&mean(&all)), &left);
        let product = times(&left, &transposed(&right));
        if config.error_feedback {
            for (error, own) in errors.iter_mut().zip(&all) {
                *error = grid(N, M, |row, col| own[row][col] - product[row][col]);
            }
        }
        results.push(product);
    }
    results
}

/// Runs the same with the hook. The bucket contains a vector before the matrix.
fn with_hook(ranks: usize, steps: usize, config: &PowerSgdConfig) -> Vec<Vec<Vec<f64>>> {
    let results = Local::run(ranks, |comm| {
        let hook = PowerSgd::new(config.clone());
        let mut results = vec![];
        for step in 0..steps {
            let mut flat = vec![comm.rank() as f64; 2];
            flat.extend(gradient(comm.rank(), step).concat());
            flat.extend([1.0, 1.0]);
            let flat = Tensor::new(flat, &Device::Cpu)?;
            let slots = vec![
                GradSlot { parameter: 2, shape: 2.into(), offset: 0 },
                GradSlot { parameter: 3, shape: (N, M).into(), offset: 2 },
            ];
            let mut reduction = hook.begin(GradBucket { flat: flat.clone(), slots })?;
            while let Some(operation) = reduction.next()? {
                comm.run(operation)?;
            }
            results.push(flat.to_vec1::<f64>()?);
        }
        Ok(results)
    });
    results.expect("no failure")
}

#[test]
fn equal_to_the_papers_algorithm() {
    for (error_feedback, warm_start) in [(true, true), (true, false), (false, true), (false, false)] {
        for ranks in 1..=4 {
            let config = PowerSgdConfig {
                rank: RANK,
                warm_up_steps: 0,
                min_compression: 1,
                error_feedback,
                warm_start,
                seed: 5,
            };
            let all = with_hook(ranks, 4, &config);
            assert!(all.iter().all(|rank| *rank == all[0]), "the ranks differ");
            for (result, expected) in all[0].iter().zip(reference(ranks, 4, &config)) {
                let mut whole = vec![(ranks as f64 - 1.0) / 2.0; 2];
                whole.extend(expected.concat());
                whole.extend([1.0, 1.0]);
                let close = |(got, expected): (&f64, &f64)| (got - expected).abs() < 1e-9;
                assert!(result.iter().zip(&whole).all(close), "{result:?} and {whole:?}");
            }
        }
    }
}

#[test]
fn what_saves_too_little_travels_whole() {
    let config = PowerSgdConfig { rank: 3, warm_up_steps: 5, min_compression: 2, ..Default::default() };
    let hook = PowerSgd::new(config);
    let rank =
        |shape: &[usize], steps| hook.rank(&GradSlot { parameter: 0, shape: shape.into(), offset: 0 }, steps);
    assert_eq!(rank(&[100, 100], 4), None);
    assert_eq!(rank(&[100, 100], 5), Some(3));
    // (13 + 12) * 3 * 2 = 150, and (12 + 12) * 3 * 2 = 144.
    assert_eq!((rank(&[13, 12], 5), rank(&[12, 12], 5), rank(&[13, 13], 5)), (Some(3), None, Some(3)));
    assert_eq!((rank(&[16, 3, 2, 8], 5), rank(&[10_000], 5), rank(&[], 5)), (Some(3), None, None));
    assert_eq!((rank(&[0, 5], 5), rank(&[5, 0], 5)), (None, None));
}
