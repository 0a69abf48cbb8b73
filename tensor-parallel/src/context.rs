//! What a layer knows of the ranks.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use comm::{Communicator, autograd};
use training::build::in_whole_rows;

use crate::split::share;
use crate::{Error, RandomStreams, Result};

/// How a model is divided, and its random numbers.
#[derive(Debug, Clone)]
pub struct TensorParallelConfig {
    /// Between the layers that are divided, each rank has a part of every sequence only: norms, dropout and residuals take
    /// `1/ranks` of the memory and time. Default: false.
    pub sequence_parallel: bool,
    /// Of dropout's random numbers. Default: 42.
    pub seed: u64,
    /// Of weights drawn from a seed or read from a file. Default: f32.
    pub dtype: DType,
    /// Where weights are. Default: the CPU.
    pub device: Device,
}

impl Default for TensorParallelConfig {
    fn default() -> Self {
        Self { sequence_parallel: false, seed: 42, dtype: DType::F32, device: Device::Cpu }
    }
}

impl TensorParallelConfig {
    /// What must be equal on all ranks.
    pub(crate) fn describe(&self) -> String {
        let Self { sequence_parallel, seed, dtype, device: _ } = self;
        format!("sequence_parallel: {sequence_parallel}, seed: {seed}, dtype: {dtype:?}")
    }
}

thread_local! {
    /// Whether this thread is in a [`crate::TensorParallel::backward`].
    static IN_BACKWARD: Cell<bool> = const { Cell::new(false) };
}

/// The tensor-parallel group as layers see it.
#[derive(Debug, Clone)]
pub struct Context {
    comm: Arc<dyn Communicator>,
    sequence_parallel: bool,
    random: RandomStreams,
    /// Whether a backward that is candle's alone leaves gradients that the ranks have not put together.
    needs_own_backward: bool,
}

impl Context {
    pub(crate) fn new(comm: Arc<dyn Communicator>, sequence_parallel: bool, random: RandomStreams) -> Self {
        Self { comm, sequence_parallel, random, needs_own_backward: false }
    }

    /// The same for layers whose gradients are put together by [`crate::TensorParallel::backward`] alone.
    pub(crate) fn with_own_backward(self) -> Self {
        Self { needs_own_backward: true, ..self }
    }

    /// Refuses a backward that is not the model's own, where that is needed.
    pub(crate) fn check_backward(&self) -> Result<()> {
        if self.needs_own_backward { check_own_backward() } else { Ok(()) }
    }

    /// The group that layers are divided over.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// This rank's place in it.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Ranks in it.
    pub fn ranks(&self) -> usize {
        self.comm.world_size()
    }

    /// Whether activations between layers are divided along the sequence: not within [`training::build::whole_rows`].
    pub fn sequence_parallel(&self) -> bool {
        self.sequence_parallel && !in_whole_rows()
    }

    /// The same for layers of which every rank is given the whole sequence.
    pub(crate) fn of_whole_sequences(&self) -> Self {
        Self { sequence_parallel: false, ..self.clone() }
    }

    /// Which positions of a sequence of this length this rank has between layers.
    pub(crate) fn positions(&self, len: usize) -> Result<Range<usize>> {
        if !self.sequence_parallel() {
            return Ok(0..len);
        }
        self.check_sequence(&[len, 1])?;
        Ok(share(len, self.rank(), self.ranks()))
    }

    /// The random numbers of this rank.
    pub fn random(&self) -> &RandomStreams {
        &self.random
    }

    /// This rank's part of activations that every rank holds, along the sequence; all of them without sequence parallelism.
    ///
    /// # Shapes
    /// (.., length, features) to (.., length / ranks, features).
    ///
    /// # Cost
    /// A copy forward, an all-gather backward.
    ///
    /// # Errors
    /// A length that the ranks do not divide.
    pub fn split_sequence(&self, x: &Tensor) -> Result<Tensor> {
        if !self.sequence_parallel() {
            return Ok(x.clone());
        }
        let dim = self.check_sequence(x.dims())?;
        Ok(autograd::split_to_group(x, dim, &self.comm)?)
    }

    /// The other way round: the parts of all ranks, for what every rank computes alike.
    ///
    /// # Cost
    /// An all-gather forward, a copy backward.
    ///
    /// # Errors
    /// Those of communication.
    pub fn gather_sequence(&self, x: &Tensor) -> Result<Tensor> {
        if !self.sequence_parallel() {
            return Ok(x.clone());
        }
        Ok(autograd::gather_from_group(x, sequence_dim(x.dims())?, &self.comm)?)
    }

    /// The parts that all ranks have of the last dimension, which is `total` long in all: each its [`share`].
    pub(crate) fn gather_shares(&self, x: &Tensor, total: usize) -> Result<Tensor> {
        let (ranks, dim) = (self.ranks(), x.rank().saturating_sub(1));
        if total.is_multiple_of(ranks) {
            return Ok(autograd::gather_from_group(x, dim, &self.comm)?);
        }
        // Parts of one length travel.
        let widest = share(total, 0, ranks).len();
        let padded = x.pad_with_zeros(dim, 0, widest - x.dim(dim)?)?;
        let all = autograd::gather_from_group(&padded, dim, &self.comm)?;
        let part = |rank: usize| all.narrow(dim, rank * widest, share(total, rank, ranks).len());
        let parts = (0..ranks).map(part).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Tensor::cat(&parts, dim)?)
    }

    /// The dimension of the sequence, if the ranks divide it.
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

/// Runs what goes backward for a [`crate::TensorParallel`].
pub(crate) fn own_backward<T>(backward: impl FnOnce() -> T) -> T {
    /// Puts back what was there before, also after a panic.
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            IN_BACKWARD.set(self.0);
        }
    }
    let _before = Before(IN_BACKWARD.replace(true));
    backward()
}

/// Refuses a backward that is not the model's own.
pub(crate) fn check_own_backward() -> Result<()> {
    if IN_BACKWARD.get() { Ok(()) } else { Err(Error::OutsideBackward) }
}

/// Activations are (.., length, features).
pub(crate) fn sequence_dim(dims: &[usize]) -> Result<usize> {
    dims.len().checked_sub(2).ok_or_else(|| {
        Error::invalid("activations", format!("the shape {dims:?}"), "give (.., length, features)")
    })
}
