//! Data parallelism: each rank computes its own optimizer steps from the common gradients.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Embedding, Linear, Module, Optimizer, VarBuilder, VarMap, embedding, linear, loss};
use girandole::comm::Communicator;
use girandole::ddp::{Ddp, DdpConfig};
use girandole::training::{Adam, AdamConfig, OptimizerState, Sgd, SgdConfig};
use girandole::{DistributedModel, Result};

use super::Outcome;
use super::collectives::bytes;

pub(super) const OPTIMIZERS: [&str; 3] = ["sgd", "adam", "adamw"];
const STEPS: usize = 200;
/// Clips some steps, and not others.
const MAX_NORM: f64 = 0.5;
const TOKENS: usize = 29;

struct Net(Embedding, Linear, Linear);

impl Net {
    fn new(builder: VarBuilder<'_>) -> candle_core::Result<Self> {
        let part = |name: &str| builder.pp(name);
        Ok(Self(
            embedding(TOKENS, 24, part("embedding"))?,
            linear(24, 51, part("hidden"))?,
            linear(51, TOKENS, part("out"))?,
        ))
    }
}

impl Module for Net {
    fn forward(&self, tokens: &Tensor) -> candle_core::Result<Tensor> {
        self.2.forward(&self.1.forward(&self.0.forward(tokens)?)?.tanh()?)
    }
}

/// Both kinds of optimizers.
trait Step: Optimizer + OptimizerState {}
impl<T: Optimizer + OptimizerState> Step for T {}

pub(super) fn train(comm: Arc<dyn Communicator>, optimizer: &str) -> Result<Outcome> {
    let map = VarMap::new();
    let builder = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let ddp = Ddp::new(comm.clone(), builder, &DdpConfig::default(), Net::new)?;
    let adam = AdamConfig { learning_rate: 3e-3, ..AdamConfig::default() };
    let sgd = SgdConfig { learning_rate: 0.1, momentum: 0.9, weight_decay: 1e-4, ..SgdConfig::default() };
    let vars = ddp.named_vars();
    match optimizer {
        "sgd" => steps(&comm, &ddp, Sgd::named(vars, sgd)?),
        "adam" => steps(&comm, &ddp, Adam::named(vars, adam)?),
        _ => steps(&comm, &ddp, Adam::named(vars, AdamConfig { weight_decay: 0.1, ..AdamConfig::adamw() })?),
    }
}

fn steps(comm: &Arc<dyn Communicator>, ddp: &Ddp<Net>, mut optimizer: impl Step) -> Result<Outcome> {
    let (peak, mut clipped) = (optimizer.learning_rate(), 0);
    for step in 0..STEPS {
        let token = |row: usize| ((row * 7 + comm.rank() * 13 + step * 3) % TOKENS) as u32;
        let tokens = Tensor::from_iter((0..16).map(token), &Device::Cpu)?;
        let targets =
            Tensor::from_iter((0..16).map(|row| (token(row) * 5 + 2) % TOKENS as u32), &Device::Cpu)?;
        // Every rank computes the schedule, too.
        optimizer.set_learning_rate(peak * (0.55 + 0.45 * (step as f64 / STEPS as f64 * 3.0).cos()));
        let mut grads = ddp.backward(&loss::cross_entropy(&ddp.forward(&tokens)?, &targets)?)?;
        clipped += usize::from(ddp.clip_grad_norm(&mut grads, MAX_NORM)? > MAX_NORM);
        optimizer.step(&grads)?;
    }
    assert!((1..STEPS).contains(&clipped), "{clipped} steps were clipped");
    let state = optimizer.state()?.into_iter().map(|(name, tensor)| (format!("state of {name}"), tensor));
    let weights = ddp.named_vars().into_iter().map(|(name, var)| (name, var.as_tensor().clone()));
    Ok(weights.chain(state).map(|(name, tensor)| (name, bytes(&tensor))).collect())
}
