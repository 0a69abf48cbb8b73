//! Tensor-parallel context of the layers: group, configuration, random streams.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, autograd};
use training::AuditConfig;
use training::build::in_whole_rows;
use training::internal::{BackwardOwner, backward_owner};

use crate::split::rank_range;
use crate::{Error, RandomStreams, Result};

/// Configuration of tensor parallelism: how a model is divided, seed, dtype, device.
#[derive(Debug, Clone)]
pub struct TensorParallelConfig {
    /// Sequence parallelism: between the divided layers, each rank has only a part of every sequence, so that norms, dropout
    /// and residuals take `1/ranks` of the memory and time. Default: false.
    pub sequence_parallel: bool,
    /// Seed of the random numbers for dropout. Default: 42.
    pub seed: u64,
    /// Dtype of weights that are drawn from a seed or read from a file. Default: f32.
    pub dtype: DType,
    /// Device of the weights. Default: the CPU.
    pub device: Device,
    /// What happens to parameters that have no gradient on any rank after the first backward. Default: a warning.
    pub audit: AuditConfig,
}

impl Default for TensorParallelConfig {
    fn default() -> Self {
        let audit = AuditConfig::default();
        Self { sequence_parallel: false, seed: 42, dtype: DType::F32, device: Device::Cpu, audit }
    }
}

impl TensorParallelConfig {
    /// Describes what must be equal on all ranks.
    pub(crate) fn describe(&self) -> String {
        let Self { sequence_parallel, seed, dtype, device: _, audit } = self;
        let own = format!("sequence_parallel: {sequence_parallel}, seed: {seed}, dtype: {dtype:?}");
        match *audit == AuditConfig::default() {
            true => own,
            false => format!("{own}, missing gradients: {audit:?}"),
        }
    }
}

/// The tensor-parallel group as layers see it.
#[derive(Debug, Clone)]
pub struct Context {
    comm: Arc<dyn Communicator>,
    sequence_parallel: bool,
    random: RandomStreams,
    /// Whether candle's plain backward would leave gradients that the ranks have not combined.
    needs_own_backward: bool,
}

impl Context {
    pub(crate) fn new(comm: Arc<dyn Communicator>, sequence_parallel: bool, random: RandomStreams) -> Self {
        Self { comm, sequence_parallel, random, needs_own_backward: false }
    }

    /// Returns the same for layers whose gradients are combined only by [`crate::TensorParallel::backward`].
    pub(crate) fn with_own_backward(self) -> Self {
        Self { needs_own_backward: true, ..self }
    }

    /// Refuses a backward that is not the model's own, if that is required.
    pub(crate) fn check_backward(&self) -> Result<()> {
        if self.needs_own_backward { check_own_backward() } else { Ok(()) }
    }

    /// Returns the group that layers are divided over.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// Returns this rank in the group.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn ranks(&self) -> usize {
        self.comm.world_size()
    }

    /// Returns whether activations between layers are divided along the sequence; false within
    /// [`training::build::whole_rows`].
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel && !in_whole_rows()
    }

    /// Returns the same without sequence parallelism, for layers whose input is the whole sequence on every rank.
    pub(crate) fn without_sequence_parallelism(&self) -> Self {
        Self { sequence_parallel: false, ..self.clone() }
    }

    /// Returns the positions of a sequence of length `len` that this rank has between layers.
    pub(crate) fn positions(&self, len: usize) -> Result<Range<usize>> {
        if !self.sequence_parallel() {
            return Ok(0..len);
        }
        self.check_sequence(&[len, 1])?;
        Ok(rank_range(len, self.rank(), self.ranks()))
    }

    /// Returns the random streams of this rank.
    pub fn random(&self) -> &RandomStreams {
        &self.random
    }

    /// Returns this rank's part, along the sequence, of activations that every rank holds; all of them without sequence
    /// parallelism.
    ///
    /// # Shapes
    /// (.., length, features) to (.., length / ranks, features).
    ///
    /// # Cost
    /// A copy in forward, an all-gather in backward.
    ///
    /// # Errors
    /// A length that is not divisible by the number of ranks.
    pub fn split_sequence(&self, x: &Tensor) -> Result<Tensor> {
        if !self.sequence_parallel() {
            return Ok(x.clone());
        }
        let dim = self.check_sequence(x.dims())?;
        Ok(autograd::split_to_group(x, dim, &self.comm)?)
    }

    /// Concatenates the parts of all ranks along the sequence: the inverse of [`split_sequence`](Self::split_sequence), for
    /// computations that are the same on every rank.
    ///
    /// # Cost
    /// An all-gather in forward, a copy in backward.
    ///
    /// # Errors
    /// Failures of communication.
    pub fn gather_sequence(&self, x: &Tensor) -> Result<Tensor> {
        if !self.sequence_parallel() {
            return Ok(x.clone());
        }
        Ok(autograd::gather_from_group(x, sequence_dim(x.dims())?, &self.comm)?)
    }

    /// Gathers all ranks' parts of the last dimension, of total length `total`; each rank has its [`rank_range`].
    pub(crate) fn gather_shares(&self, x: &Tensor, total: usize) -> Result<Tensor> {
        let (ranks, dim) = (self.ranks(), x.rank().saturating_sub(1));
        if total.is_multiple_of(ranks) {
            return Ok(autograd::gather_from_group(x, dim, &self.comm)?);
        }
        // Padded, since the gathered parts must have equal lengths.
        let widest = rank_range(total, 0, ranks).len();
        let padded = x.pad_with_zeros(dim, 0, widest - x.dim(dim)?)?;
        let all = autograd::gather_from_group(&padded, dim, &self.comm)?;
        let part = |rank: usize| all.narrow(dim, rank * widest, rank_range(total, rank, ranks).len());
        let parts = (0..ranks).map(part).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Tensor::cat(&parts, dim)?)
    }

    /// Returns the dimension of the sequence, after checking that its length is divisible by the number of ranks.
    pub(crate) fn check_sequence(&self, dims: &[usize]) -> Result<usize> {
        let dim = sequence_dim(dims)?;
        let (size, ranks) = (dims[dim], self.ranks());
        if !size.is_multiple_of(ranks) {
            let what = "with sequence parallelism, the length of a sequence".into();
            return Err(Error::Indivisible { what, size, parts: ranks, ranks });
        }
        Ok(dim)
    }
}

/// What stands for all divided models of this crate, whose layers do not know of which one they are.
struct AnyModel;

/// Runs a backward pass as [`crate::TensorParallel`]'s own. If it panics, `panicked` is called.
pub(crate) fn own_backward<T>(backward: impl FnOnce() -> T, panicked: impl FnOnce()) -> T {
    training::internal::backward_of(&AnyModel, backward, panicked)
}

/// Returns an error in a backward that is not the model's own.
pub(crate) fn check_own_backward() -> Result<()> {
    if backward_owner(&AnyModel) == BackwardOwner::Nobody { Err(Error::OutsideBackward) } else { Ok(()) }
}

/// Returns the index of the sequence dimension. Activations are (.., length, features).
pub(crate) fn sequence_dim(dims: &[usize]) -> Result<usize> {
    dims.len().checked_sub(2).ok_or_else(|| {
        Error::invalid("activations", format!("the shape {dims:?}"), "give (.., length, features)")
    })
}
