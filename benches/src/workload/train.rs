//! What the measured loop runs: training steps of a model that is distributed in some way.

use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::Optimizer;
use cli::error::Result;
use training::Adam;

/// A training workload on one rank.
pub(super) struct Workload {
    /// Number of elements of this rank's parameters.
    pub(super) parameters: usize,
    /// Takes one step.
    pub(super) step: Box<dyn FnMut() -> Result<Step>>,
}

/// Measurements of a step.
pub(super) struct Step {
    /// Seconds of forward, of backward with all communication, and of the optimizer.
    pub(super) phases: [f64; 3],
    /// Bytes that this rank has sent.
    pub(super) bytes_sent: u64,
}

impl Workload {
    /// `vars` are this rank's parameters.
    pub(super) fn new(vars: &[Var], step: impl FnMut() -> Result<Step> + 'static) -> Self {
        Self { parameters: vars.iter().map(|var| var.elem_count()).sum(), step: Box::new(step) }
    }
}

/// Takes a step and times its phases.
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
