//! What is measured: one step of a strategy.

use std::time::Instant;

use bin::error::Result;
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_nn::Optimizer;
use training::Adam;

/// Something that is trained.
pub(super) trait Train {
    /// One step; the seconds of forward, of backward with all communication, and of the optimizer.
    fn step(&mut self) -> Result<[f64; 3]>;

    /// Bytes that this rank has sent so far.
    fn bytes_sent(&self) -> u64;

    /// Elements of this rank's parameters.
    fn parameters(&self) -> usize;
}

/// One step, as [`Train::step`] gives it.
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
