//! PowerSGD: gradients of matrices as products of two thin ones, by one step of power iteration in each step of training.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{D, DType, Tensor};
use comm::{Operation, ReduceOp};

use super::all_reduce::Once;
use super::orthogonal::{Random, orthonormalise};
use super::{BucketHook, GradBucket, GradSlot, Reduction};
use crate::{Result, lock};

/// How PowerSGD compresses. The defaults are PyTorch's.
///
/// A gradient of n x m elements (n: its first dim, m: all others together) travels as (n + m) x rank. What is left out is
/// kept on this rank and added to the gradient of the next step. A gradient of rank `rank` or less arrives as it is, but for
/// rounding. Memory: as much as the parameters once more. What is kept is not part of any checkpoint.
///
/// # Cost
/// Two all-reduces for each bucket; the second one goes out with the next bucket's first.
///
/// # Source
/// Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
/// 2019, algorithms 1 and 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PowerSgdConfig {
    /// Columns of the thin matrices, at least 1. Default: 1.
    pub rank: usize,
    /// Steps at the start in which gradients travel whole. Default: 1000; early gradients are far from low rank.
    pub warm_up_steps: usize,
    /// A gradient is compressed where that saves more than this factor. Default: 2; vectors never are.
    pub min_compression: usize,
    /// Adds what one step left out to the next. Default: true. Without, training may not converge.
    pub error_feedback: bool,
    /// Begins each step's power iteration with what the last one found. Default: true.
    pub warm_start: bool,
    /// Of the random matrices that power iteration begins with, the same on every rank. Default: 0.
    pub seed: u64,
}

impl Default for PowerSgdConfig {
    fn default() -> Self {
        Self {
            rank: 1,
            warm_up_steps: 1000,
            min_compression: 2,
            error_feedback: true,
            warm_start: true,
            seed: 0,
        }
    }
}

/// What is kept of one parameter from step to step.
#[derive(Debug, Default)]
struct Kept {
    steps: usize,
    /// The right factor, m x rank.
    right: Option<Tensor>,
    error: Option<Tensor>,
}

type Memory = Arc<Mutex<HashMap<usize, Kept>>>;

#[derive(Debug)]
pub(super) struct PowerSgd {
    config: PowerSgdConfig,
    memory: Memory,
}

impl PowerSgd {
    pub(super) fn new(config: PowerSgdConfig) -> Self {
        Self { config, memory: Memory::default() }
    }

    /// The columns of a matrix's factors; none where it travels whole.
    fn rank(&self, slot: &GradSlot, steps: usize) -> Option<usize> {
        let (n, elements) = (*slot.shape.dims().first()?, slot.shape.elem_count());
        if slot.shape.rank() < 2 || elements == 0 || steps < self.config.warm_up_steps {
            return None;
        }
        let m = elements / n;
        let rank = self.config.rank.clamp(1, n.min(m));
        ((n + m) * rank * self.config.min_compression.max(1) < elements).then_some(rank)
    }

    fn compressed(&self, flat: &Tensor, slot: &GradSlot) -> Result<Option<Matrix>> {
        let mut memory = lock(&self.memory);
        let kept = memory.entry(slot.parameter).or_default();
        let steps = kept.steps;
        kept.steps += 1;
        let Some(rank) = self.rank(slot, steps) else { return Ok(None) };
        let (n, m) = (slot.shape.dims()[0], slot.shape.elem_count() / slot.shape.dims()[0]);
        let dtype = if flat.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let gradient = flat.narrow(0, slot.offset, n * m)?.reshape((n, m))?.to_dtype(dtype)?;
        let gradient = match kept.error.take() {
            Some(error) => (gradient + error)?,
            None => gradient,
        };
        let right = match kept.right.take().filter(|_| self.config.warm_start) {
            Some(right) => right,
            None => {
                let mut random = Random::new([self.config.seed, slot.parameter as u64, steps as u64]);
                let elements: Vec<f64> = (0..m * rank).map(|_| random.next()).collect();
                Tensor::from_vec(elements, (m, rank), flat.device())?.to_dtype(dtype)?
            }
        };
        let left = gradient.matmul(&right)?;
        Ok(Some(Matrix { slot: slot.clone(), gradient, left, right, is_finite: true }))
    }
}

impl BucketHook for PowerSgd {
    fn begin(&self, GradBucket { flat, slots }: GradBucket) -> Result<Box<dyn Reduction>> {
        let (mut matrices, mut whole) = (Vec::new(), Vec::new());
        for slot in &slots {
            match self.compressed(&flat, slot)? {
                Some(matrix) => matrices.push(matrix),
                None if slot.shape.elem_count() == 0 => {}
                None => whole.push((slot.offset, slot.shape.elem_count())),
            }
        }
        if matrices.is_empty() {
            return Ok(Box::new(Once(Some(flat))));
        }
        let flags = flat.narrow(0, flat.elem_count() - slots.len(), slots.len())?;
        whole.push((flat.elem_count() - slots.len(), slots.len()));
        let parameters = slots.iter().map(|slot| slot.parameter).collect();
        let (config, memory) = (self.config.clone(), self.memory.clone());
        Ok(Box::new(Factors {
            flat,
            flags,
            parameters,
            whole,
            matrices,
            config,
            memory,
            sent: Sent::Nothing,
        }))
    }
}

/// One gradient, and its factors: left times right transposed.
struct Matrix {
    slot: GradSlot,
    /// n x m; without error feedback a view of the bucket.
    gradient: Tensor,
    /// n x rank.
    left: Tensor,
    /// m x rank.
    right: Tensor,
    is_finite: bool,
}

/// What is under way.
enum Sent {
    Nothing,
    Left(Tensor),
    Right(Tensor),
}

struct Factors {
    flat: Tensor,
    flags: Tensor,
    parameters: Vec<usize>,
    /// Offsets and lengths of what travels whole.
    whole: Vec<(usize, usize)>,
    matrices: Vec<Matrix>,
    config: PowerSgdConfig,
    memory: Memory,
    sent: Sent,
}

impl Reduction for Factors {
    fn next(&mut self) -> Result<Option<Operation>> {
        let (packed, sent): (Tensor, fn(Tensor) -> Sent) =
            match std::mem::replace(&mut self.sent, Sent::Nothing) {
                Sent::Nothing => (self.pack_left()?, Sent::Left),
                Sent::Left(packed) => {
                    self.unpack_left(&packed)?;
                    (self.pack_right()?, Sent::Right)
                }
                Sent::Right(packed) => {
                    self.unpack_right(&packed)?;
                    return Ok(None);
                }
            };
        self.sent = sent(packed.clone());
        Ok(Some(Operation::AllReduce { tensor: packed, op: ReduceOp::Avg }))
    }

    fn has_more(&self) -> bool {
        matches!(self.sent, Sent::Left(_))
    }
}

impl Factors {
    fn pack_left(&self) -> Result<Tensor> {
        let whole = self.whole.iter().map(|&(offset, len)| self.flat.narrow(0, offset, len));
        let left = self.matrices.iter().map(|matrix| matrix.left.flatten_all()?.to_dtype(self.flat.dtype()));
        Ok(Tensor::cat(&whole.chain(left).collect::<candle_core::Result<Vec<_>>>()?, 0)?)
    }

    /// The means of the left factors, made orthonormal.
    fn unpack_left(&mut self, packed: &Tensor) -> Result<()> {
        let mut at = 0;
        for &(offset, len) in &self.whole {
            self.flat.slice_set(&packed.narrow(0, at, len)?, 0, offset)?;
            at += len;
        }
        for matrix in &mut self.matrices {
            let (n, rank) = matrix.left.dims2()?;
            let mean = packed.narrow(0, at, n * rank)?.reshape((n, rank))?;
            at += n * rank;
            let mut columns = mean.t()?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
            matrix.is_finite = columns.iter().flatten().all(|element| element.is_finite());
            orthonormalise(&mut columns);
            let columns = Tensor::from_vec(columns.concat(), (rank, n), self.flat.device())?;
            matrix.left = columns.t()?.contiguous()?.to_dtype(matrix.gradient.dtype())?;
        }
        Ok(())
    }

    fn pack_right(&self) -> Result<Tensor> {
        let right = |matrix: &Matrix| {
            matrix.gradient.t()?.matmul(&matrix.left)?.flatten_all()?.to_dtype(self.flat.dtype())
        };
        Ok(Tensor::cat(&self.matrices.iter().map(right).collect::<candle_core::Result<Vec<_>>>()?, 0)?)
    }

    /// The gradients, from both factors, and what they leave out.
    fn unpack_right(&mut self, packed: &Tensor) -> Result<()> {
        let flags = self.flags.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let mut memory = lock(&self.memory);
        let mut at = 0;
        for matrix in &mut self.matrices {
            let (m, rank) = matrix.right.dims2()?;
            let dtype = matrix.gradient.dtype();
            matrix.right = packed.narrow(0, at, m * rank)?.reshape((m, rank))?.to_dtype(dtype)?;
            at += m * rank;
            let product = product(&matrix.left, &matrix.right)?.to_dtype(self.flat.dtype())?;
            let slot = &matrix.slot;
            let kept = memory.entry(slot.parameter).or_default();
            if !matrix.is_finite || !is_finite(&matrix.right)? {
                // Seen by all, and forgotten: it must not come back with every later step.
                let nothing = (product.zeros_like()? + f64::NAN)?;
                self.flat.slice_set(&nothing.flatten_all()?, 0, slot.offset)?;
                continue;
            }
            let is_used = self
                .parameters
                .iter()
                .zip(&flags)
                .any(|(&parameter, &flag)| parameter == slot.parameter && flag > 0.0);
            if self.config.error_feedback {
                kept.error = Some(match is_used {
                    true => (&matrix.gradient - product.to_dtype(dtype)?)?,
                    false => matrix.gradient.copy()?,
                });
            }
            kept.right = Some(matrix.right.clone());
            self.flat.slice_set(&product.flatten_all()?, 0, slot.offset)?;
        }
        Ok(())
    }
}

/// Left times right transposed, element by element: matrix products are not equal to the bit on all processors.
fn product(left: &Tensor, right: &Tensor) -> Result<Tensor> {
    let right = right.t()?.contiguous()?;
    let term = |index| left.narrow(1, index, 1)?.contiguous()?.broadcast_mul(&right.narrow(0, index, 1)?);
    let mut sum = term(0)?;
    for index in 1..left.dim(1)? {
        sum = (sum + term(index)?)?;
    }
    Ok(sum)
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    let sum = tensor.abs()?.to_dtype(DType::F64)?.flatten_all()?.sum(D::Minus1)?.to_scalar::<f64>()?;
    Ok(sum.is_finite())
}

#[cfg(test)]
mod tests {
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
        grid(left.len(), right[0].len(), |row, col| {
            (0..right.len()).map(|k| left[row][k] * right[k][col]).sum()
        })
    }

    fn transposed(grid_: &Grid) -> Grid {
        grid(grid_[0].len(), grid_.len(), |row, col| grid_[col][row])
    }

    /// Two columns, by the textbook.
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

    /// The paper's algorithm on all ranks' gradients at once; the result of each step.
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

    /// The same with the hook. A vector lies before the matrix.
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
        let rank = |shape: &[usize], steps| {
            hook.rank(&GradSlot { parameter: 0, shape: shape.into(), offset: 0 }, steps)
        };
        assert_eq!(rank(&[100, 100], 4), None);
        assert_eq!(rank(&[100, 100], 5), Some(3));
        // (13 + 12) * 3 * 2 = 150, and (12 + 12) * 3 * 2 = 144.
        assert_eq!((rank(&[13, 12], 5), rank(&[12, 12], 5), rank(&[13, 13], 5)), (Some(3), None, Some(3)));
        assert_eq!((rank(&[16, 3, 2, 8], 5), rank(&[10_000], 5), rank(&[], 5)), (Some(3), None, None));
        assert_eq!((rank(&[0, 5], 5), rank(&[5, 0], 5)), (None, None));
    }
}
