//! Differentiable collectives.
//!
//! Each of these functions must be called by every rank of the group, in the same order; so must `backward`, in which
//! each runs the adjoint collective. There are two ways to count the loss of a group, and for each of them some
//! functions:
//!
//! - If all ranks continue with the same tensor and compute the same loss, it counts once: [`copy_to_group`] and
//!   [`reduce_from_group`], [`split_to_group`] and [`gather_from_group`].
//! - If each rank continues with its own tensor, the losses of all ranks are summed: [`all_gather`] and
//!   [`reduce_scatter`], [`all_to_all`].
//!
//! [`custom`] is for operations that compute and communicate in one.
//!
//! ```
//! use std::sync::Arc;
//! use candle_core::{Device, Var};
//! use comm::{Communicator, Local, LocalConfig, autograd};
//!
//! let ranks = Local::group(2, &LocalConfig::default())?;
//! let threads: Vec<_> = ranks.into_iter().map(|comm| {
//!     std::thread::spawn(move || -> comm::Result<Vec<f32>> {
//!         let comm: Arc<dyn Communicator> = Arc::new(comm);
//!         let x = Var::new(&[1f32, 2.0], &Device::Cpu)?;
//!         let mine = (autograd::copy_to_group(&x, &comm)? * (1 + comm.rank()) as f64)?;
//!         let loss = autograd::reduce_from_group(&mine, &comm)?.sum_all()?;
//!         Ok(loss.backward()?.get(&x).unwrap().to_vec1()?)
//!     })
//! }).collect();
//! for thread in threads {
//!     assert_eq!(thread.join().unwrap()?, [3.0, 3.0]);
//! }
//! # Ok::<(), comm::Error>(())
//! ```

mod op;
mod tensors;

use std::sync::Arc;

use candle_core::Tensor;

use crate::{Communicator, Result};

use op::differentiable;
pub use op::{custom, custom_with_new_gradients};

type Comm = Arc<dyn Communicator>;

/// Returns the tensor unchanged; its gradient is the sum of the gradients on all ranks. Used at the entry of a part of
/// a model in which each rank computes something different from the same input.
///
/// # Shapes
/// `x` is the same on every rank.
///
/// # Cost
/// A copy forward, an all-reduce backward.
///
/// # Errors
/// Those of [`Communicator::run`], forward and backward.
///
/// # Source
/// Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, section 3
/// (the operator f).
pub fn copy_to_group(x: &Tensor, comm: &Comm) -> Result<Tensor> {
    let output = tensors::detached_copy(x)?;
    differentiable("copy_to_group", x, output, comm, |grad, comm| tensors::sum(grad, comm))
}

/// Returns the sum over all ranks; its gradient is passed back unchanged. Used at the exit of a part of a model in
/// which each rank has computed a summand of the same output.
///
/// # Shapes
/// The same on every rank.
///
/// # Cost
/// An all-reduce forward, nothing backward.
///
/// # Errors
/// Those of [`Communicator::run`].
///
/// # Source
/// Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019, section 3
/// (the operator g).
pub fn reduce_from_group(x: &Tensor, comm: &Comm) -> Result<Tensor> {
    let output = tensors::sum(x, &**comm)?;
    differentiable("reduce_from_group", x, output, comm, |grad, _| Ok(grad.clone()))
}

/// Returns this rank's part of `world_size` equal parts along `dim`; backward, the gradients of all parts are gathered.
///
/// # Shapes
/// `x` is the same on every rank, its `dim` a multiple of `world_size`.
///
/// # Cost
/// A copy of the part forward, an all-gather backward.
///
/// # Errors
/// A `dim` that cannot be divided; those of [`Communicator::run`], backward.
pub fn split_to_group(x: &Tensor, dim: usize, comm: &Comm) -> Result<Tensor> {
    let output = tensors::own_part(x, dim, &**comm)?;
    differentiable("split_to_group", x, output, comm, move |grad, comm| tensors::gather(grad, dim, comm))
}

/// Concatenates the tensors of all ranks along `dim`; backward, each rank takes its part of the gradient.
///
/// # Shapes
/// `x` has the same shape on every rank; the output has `world_size` times as much along `dim`.
///
/// # Cost
/// An all-gather forward, a copy of the part backward.
///
/// # Errors
/// A `dim` that `x` does not have; those of [`Communicator::run`].
pub fn gather_from_group(x: &Tensor, dim: usize, comm: &Comm) -> Result<Tensor> {
    let output = tensors::gather(x, dim, &**comm)?;
    differentiable("gather_from_group", x, output, comm, move |grad, comm| tensors::own_part(grad, dim, comm))
}

/// Concatenates the tensors of all ranks along `dim`; backward, the gradients of all ranks are summed, and each takes
/// its part.
///
/// # Shapes
/// `x` has the same shape on every rank; the output has `world_size` times as much along `dim`.
///
/// # Cost
/// An all-gather forward, a reduce-scatter backward.
///
/// # Errors
/// A `dim` that `x` does not have; those of [`Communicator::run`], forward and backward.
pub fn all_gather(x: &Tensor, dim: usize, comm: &Comm) -> Result<Tensor> {
    let output = tensors::gather(x, dim, &**comm)?;
    differentiable("all_gather", x, output, comm, move |grad, comm| tensors::sum_part(grad, dim, comm))
}

/// Returns this rank's part, of `world_size` equal parts along `dim`, of the sum over all ranks; backward, the
/// gradients of all parts are gathered.
///
/// # Shapes
/// `x` has the same shape on every rank, its `dim` a multiple of `world_size`.
///
/// # Cost
/// A reduce-scatter forward, an all-gather backward.
///
/// # Errors
/// A `dim` that cannot be divided; those of [`Communicator::run`], forward and backward.
pub fn reduce_scatter(x: &Tensor, dim: usize, comm: &Comm) -> Result<Tensor> {
    let output = tensors::sum_part(x, dim, &**comm)?;
    differentiable("reduce_scatter", x, output, comm, move |grad, comm| tensors::gather(grad, dim, comm))
}

/// Splits `x` along `split_dim`, one part for each rank, and concatenates the parts received from all ranks along
/// `concat_dim`.
///
/// # Shapes
/// `x` has the same shape on every rank, its `split_dim` a multiple of `world_size`. In the output, `split_dim` is
/// shorter, and `concat_dim` longer, by a factor of `world_size`.
///
/// # Cost
/// An all-to-all forward, and one backward.
///
/// # Errors
/// A `split_dim` that cannot be divided; those of [`Communicator::run`], forward and backward.
pub fn all_to_all(x: &Tensor, split_dim: usize, concat_dim: usize, comm: &Comm) -> Result<Tensor> {
    let output = tensors::exchange(x, split_dim, concat_dim, &**comm)?;
    differentiable("all_to_all", x, output, comm, move |grad, comm| {
        tensors::exchange(grad, concat_dim, split_dim, comm)
    })
}
