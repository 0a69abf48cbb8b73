//! PowerSGD: compresses gradients of matrices to low-rank factors, with one power iteration per training step.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use candle_core::{D, DType, Tensor};
use comm::{Operation, ReduceOp};

use super::all_reduce::SingleAllReduce;
use super::orthogonal::{Random, orthonormalise};
use super::{BucketHook, GradBucket, GradSlot, Reduction};
use crate::{Result, lock};

/// Configuration of PowerSGD. The defaults are PyTorch's.
///
/// A gradient of n x m elements (n: its first dimension, m: product of the others) is sent as (n + m) x rank elements. The
/// approximation error is kept on this rank and added to the gradient of the next step. A gradient whose rank is at most
/// `rank` is reproduced exactly, except for rounding. Memory: as much as the parameters. This state is not saved in
/// checkpoints.
///
/// # Cost
/// Two all-reduces per bucket; the second one is started with the next bucket's first.
///
/// # Source
/// Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
/// 2019, algorithms 1 and 2.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PowerSgdConfig {
    /// Columns of the factors, at least 1. Default: 1.
    pub rank: usize,
    /// Initial steps in which gradients are sent uncompressed. Default: 1000; early gradients are far from low rank.
    pub warm_up_steps: usize,
    /// A gradient is compressed only if that reduces its size by more than this factor. Default: 2; vectors are never
    /// compressed.
    pub min_compression: usize,
    /// Adds the approximation error of a step to the next step's gradient. Default: true. Without it, training may not
    /// converge.
    pub error_feedback: bool,
    /// Starts each step's power iteration from the previous step's result. Default: true.
    pub warm_start: bool,
    /// Seed of the random matrices that power iteration starts from, the same on every rank. Default: 0.
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

/// State of one parameter that is kept between steps.
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

    /// Returns the number of columns of a matrix's factors; `None` if it is sent uncompressed.
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
            return Ok(Box::new(SingleAllReduce(Some(flat))));
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

/// One gradient and its factors: left times transposed right.
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

/// The all-reduce in progress.
enum Sent {
    Nothing,
    Left(Tensor),
    Right(Tensor),
}

struct Factors {
    flat: Tensor,
    flags: Tensor,
    parameters: Vec<usize>,
    /// Offsets and lengths of what is sent uncompressed.
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

    /// Unpacks the averaged left factors, and makes them orthonormal.
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

    /// Computes the gradients from both factors, and stores the approximation errors.
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
                // All ranks see that it is not finite; the error is not kept, so that it does not affect later steps.
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

/// Multiplies left by transposed right, element by element: matrix products are not bitwise equal on all processors.
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
mod tests;
