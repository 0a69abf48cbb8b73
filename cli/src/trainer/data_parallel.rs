//! Training strategies: data parallelism (DDP), and a single process.

use std::marker::PhantomData;
use std::sync::Arc;

use candle_core::Tensor;
use candle_nn::{Optimizer, VarMap};
use comm::{Communicator, Stats};
use ddp::Ddp;
use ops::activation_bytes;
use report::counted;
use report::metrics::MemoryUse;
use strategy::checkpoint::{DeferredSnapshot, Receiver, transfer};
use strategy::{DistributedModel, ModelCopy};
use training::{Checkpoint, Checkpoints, Contents, OptimizerState, named_vars};

use crate::error::Result;
use crate::held::{bytes, gradient_bytes};
use crate::options::with_fallback_hint;

use super::{Position, StepRandom, Strategy, Whole};

/// A data-parallel model with its optimizer and its loss.
pub struct DataParallel<M, B, O, L> {
    ddp: Ddp<M>,
    optimizer: O,
    loss: L,
    batch: PhantomData<fn(&B)>,
    /// All variables of the model, including buffers.
    vars: VarMap,
    /// Random generator of the steps, and this rank's number.
    random: Option<(StepRandom, usize)>,
    /// Bytes of activations and of gradients, measured in the first step.
    first: Option<(u64, u64)>,
    /// Bytes sent in steps so far.
    sent: u64,
    latest: Option<(Position, Tensor)>,
}

impl<M, B, O, L> DataParallel<M, B, O, L>
where
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    /// `loss` computes the loss of the model (`&M`) on a batch (`&B`); `vars` has all variables of the model,
    /// including buffers.
    pub fn new(ddp: Ddp<M>, optimizer: O, loss: L, vars: &VarMap) -> Self {
        let (vars, batch) = (vars.clone(), PhantomData);
        Self { ddp, optimizer, loss, batch, vars, random: None, first: None, sent: 0, latest: None }
    }

    /// Sets the generator that steps draw from (for dropout, for example), and the rank number that seeds it.
    #[must_use]
    pub fn drawing(self, random: Option<StepRandom>, rank: usize) -> Self {
        Self { random: random.map(|random| (random, rank)), ..self }
    }

    /// Returns the data-parallel model.
    pub fn ddp(&self) -> &Ddp<M> {
        &self.ddp
    }
}

impl<M, B, O, L> Strategy for DataParallel<M, B, O, L>
where
    O: Optimizer + OptimizerState,
    L: Fn(&M, &B) -> candle_core::Result<Tensor>,
{
    type Batch = B;

    fn name(&self, world_size: usize) -> String {
        format!("DDP, {}", counted(world_size, "rank"))
    }

    fn step(&mut self, at: Position, batch: &B) -> Result<Option<Tensor>> {
        if let Some((random, rank)) = &self.random {
            random.begin(*rank, at.step);
        }
        let loss = tracing::info_span!("forward")
            .in_scope(|| Ok::<_, ddp::Error>((self.loss)(self.ddp.model()?, batch)));
        let loss = loss??;
        let activations = match self.first {
            Some((activations, _)) => activations,
            None => {
                let copies = self.ddp.parameters().iter().map(|parameter| parameter.tensor());
                activation_bytes(&loss, copies) as u64
            }
        };
        self.latest = Some((at, loss.detach()));
        let sent = self.ddp.stats().bytes_sent;
        let grads = self.ddp.backward(&loss)?;
        self.sent += self.ddp.stats().bytes_sent - sent;
        if self.first.is_none() {
            self.first = Some((activations, gradient_bytes(&self.ddp.vars(), &grads)));
        }
        tracing::info_span!("optimizer").in_scope(|| self.optimizer.step(&grads))?;
        Ok(Some(loss))
    }

    fn held(&self) -> Result<MemoryUse> {
        let parameters = self.ddp.parameters();
        let (activations, gradients) = self.first.unwrap_or_default();
        Ok(MemoryUse {
            weights: bytes(named_vars(&self.vars).iter().map(|(_, var)| var.as_tensor())),
            copies: bytes(parameters.iter().map(|parameter| parameter.tensor())),
            gradients,
            optimizer: bytes(self.optimizer.state()?.iter().map(|(_, tensor)| tensor)),
            activations,
            sent: 0.0,
        })
    }

    fn stats(&self) -> Stats {
        Stats { bytes_sent: self.sent, ..Stats::default() }
    }

    fn save(&self, to: &Checkpoints, checkpoint: Checkpoint) -> Result<()> {
        self.ddp.save_alone(to, Some(&self.optimizer), &checkpoint)?;
        Ok(())
    }

    fn load(&mut self, from: &Contents) -> Result<()> {
        self.ddp.load_alone(from, Some(&mut self.optimizer)).map_err(with_fallback_hint)?;
        Ok(())
    }

    fn whole(&mut self) -> Option<&mut dyn Whole> {
        Some(self)
    }
}

impl<M, B, O, L> Whole for DataParallel<M, B, O, L>
where
    O: Optimizer + OptimizerState,
{
    fn share(&mut self, comm: &dyn Communicator, root: usize, receives: bool) -> Result<()> {
        let is_root = comm.rank() == root;
        let own = || DeferredSnapshot::of(&self.ddp, String::new(), ModelCopy::ONLY, Some(&self.optimizer));
        let own = if is_root { Some(own()?.copy()?) } else { None };
        let receiver = match receives {
            true => Some(Receiver { pieces: self.ddp.pieces()?, optimizer: &mut self.optimizer }),
            false => None,
        };
        transfer(comm, own.as_ref(), is_root, receiver)?;
        Ok(())
    }

    fn regroup(&mut self, comm: Arc<dyn Communicator>) -> Result<()> {
        if let Some((_, rank)) = &mut self.random {
            *rank = comm.rank();
        }
        Ok(self.ddp.regroup(comm)?)
    }

    fn check(&self) -> Result<()> {
        Ok(self.ddp.check_parameters()?)
    }

    fn latest(&self) -> Option<&(Position, Tensor)> {
        self.latest.as_ref()
    }
}

/// Single-process training; `step` takes a batch, updates the model and returns the loss.
pub struct SingleProcess<B, F> {
    step: F,
    batch: PhantomData<fn(&B)>,
}

impl<B, F: FnMut(&B) -> Result<Tensor>> SingleProcess<B, F> {
    /// Creates the strategy with this step.
    pub fn new(step: F) -> Self {
        Self { step, batch: PhantomData }
    }
}

impl<B, F: FnMut(&B) -> Result<Tensor>> Strategy for SingleProcess<B, F> {
    type Batch = B;

    fn step(&mut self, _: Position, batch: &B) -> Result<Option<Tensor>> {
        (self.step)(batch).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::{Linear, Module, VarBuilder, linear};
    use comm::Local;
    use ddp::DdpConfig;
    use training::{Adam, AdamConfig};

    use super::*;
    use crate::error::Error;

    #[test]
    fn a_rank_that_receives_gets_the_model_and_the_optimizer_of_another_and_no_other_rank_changes() {
        let shared = Local::run_shared(3, |comm| {
            let vars = VarMap::new();
            let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
            let carry = |error: Error| candle_core::Error::msg(error.to_string());
            let ddp = Ddp::new(comm.clone(), builder, &DdpConfig::default(), |builder| linear(3, 2, builder))
                .map_err(|error| carry(error.into()))?;
            let optimizer =
                Adam::named(ddp.named_vars(), AdamConfig::default()).map_err(|error| carry(error.into()))?;
            let loss = |layer: &Linear, x: &Tensor| layer.forward(x)?.sqr()?.mean_all();
            let mut model = DataParallel::new(ddp, optimizer, loss, &vars);
            let x = Tensor::ones((4, 3), DType::F32, &Device::Cpu)?;
            (0..2)
                .try_for_each(|step| model.step(Position { step, ..Position::default() }, &x).map(drop))
                .map_err(carry)?;
            // From here on each rank has its own numbers.
            let factor = 1.0 + comm.rank() as f64;
            for (_, var) in model.ddp.named_vars() {
                var.set(&(var.as_tensor() * factor)?)?;
            }
            let state = model.optimizer.state().map_err(|error| carry(error.into()))?;
            let scaled = state.into_iter().map(|(key, tensor)| {
                let tensor = if tensor.dtype().is_float() { (tensor * factor)? } else { tensor };
                Ok((key, tensor))
            });
            let scaled = scaled.collect::<candle_core::Result<_>>()?;
            model.optimizer.load_state(&scaled).map_err(|error| carry(error.into()))?;
            model.share(&*comm, 1, comm.rank() == 2).map_err(carry)?;
            let mut numbers = Vec::new();
            let state = model.optimizer.state().map_err(|error| carry(error.into()))?;
            let vars = model.ddp.named_vars();
            let vars =
                vars.iter().map(|(_, var)| var.as_tensor()).chain(state.iter().map(|(_, tensor)| tensor));
            for tensor in vars {
                numbers.extend(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()?);
            }
            Ok(numbers)
        });
        let [first, second, third] = shared.unwrap().try_into().unwrap();
        assert!(second == third && first != second && first.len() == 8 + 16 + 2, "{first:?} {second:?}");
    }
}
