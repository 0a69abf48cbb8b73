//! The interface of a workload to the measured loop: one training step.

use std::time::Instant;

use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_nn::Optimizer;
use experiment::error::Result;
use training::Adam;

/// A training workload on one rank.
pub(super) trait Train {
    /// Takes one step; returns the seconds of forward, of backward with all communication, and of the optimizer.
    fn step(&mut self) -> Result<[f64; 3]>;

    /// Returns the bytes that this rank has sent so far.
    fn bytes_sent(&self) -> u64;

    /// Returns the number of elements of this rank's parameters.
    fn parameters(&self) -> usize;
}

/// Takes and times one step, for [`Train::step`].
pub(super) fn timed(
    optimizer: &mut Adam,
    forward: impl FnOnce() -> Result<Tensor>,
    backward: impl FnOnce(&Tensor) -> Result<GradStore>,
) -> Result<[f64; 3]> {
    let began = Instant::now();
    let loss = forward()?;
    let forward = began.elapsed().as_secs_f64();
    let gradients = backward(&loss)?;
    let backward = began.elapsed().as_secs_f64();
    optimizer.step(&gradients)?;
    Ok([forward, backward - forward, began.elapsed().as_secs_f64() - backward])
}
