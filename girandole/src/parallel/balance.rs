//! Balance of experts: the loss that is added to gradients, and the load of each expert.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use comm::{Communicator, ReduceOp, Work, all_gather_object};
use ops::{Balance, BalanceConfig, BalanceLoss, EXPERT_CORRECTION, PendingSum, RankSum, correction_moves};
use serde::{Deserialize, Serialize};
use training::LossScaler;
use training::build::Model;

use super::Parallel;
use crate::{Error, Result};

/// How the experts of a model are balanced in training: by a loss, by corrections, or both. See [`ParallelConfig::balance`](crate::ParallelConfig::balance).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertBalance {
    /// The loss that is added. Default: none, only the loads are counted.
    pub loss: Option<BalanceLoss>,
    /// Its coefficient. Default: 0.001.
    pub coefficient: f64,
    /// How far [`Parallel::move_corrections`] moves the corrections of routers ([`ops::Router::corrected`]). Default: none, they stay
    /// as they are.
    pub bias: Option<f64>,
    /// Number of experts of each router.
    pub experts: usize,
}

impl ExpertBalance {
    /// Counts the loads of so many experts, without a loss.
    pub fn counting(experts: usize) -> Self {
        Self { loss: None, coefficient: 0.001, bias: None, experts }
    }
}

/// The load of a router's experts in a step, of all ranks and micro-batches.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoad {
    /// The router's name.
    pub router: String,
    /// Number of tokens of each expert.
    pub tokens: Vec<f64>,
}

impl ExpertLoad {
    /// The share of the busiest expert in all choices, from 0 to 1; 0 without any.
    pub fn busiest(&self) -> f64 {
        let sum: f64 = self.tokens.iter().sum();
        if sum == 0.0 { 0.0 } else { self.tokens.iter().copied().fold(0.0, f64::max) / sum }
    }
}

/// What a step tells of experts, beside their gradients.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Routing {
    /// Names of all routers, of all stages, in the order of layers; `None` before the first step.
    routers: Option<Vec<String>>,
    /// Those of this rank.
    own: Vec<String>,
    pub(crate) loads: Vec<ExpertLoad>,
    /// Whether the corrections of routers have not been moved by these loads.
    is_new: bool,
}

#[derive(Debug)]
struct Group(Arc<dyn Communicator>);

struct Pending(Tensor, Work);

impl RankSum for Group {
    fn ranks(&self) -> usize {
        self.0.world_size()
    }

    fn begin(&self, numbers: Vec<f64>) -> candle_core::Result<Box<dyn PendingSum>> {
        let len = numbers.len();
        let tensor = Tensor::from_vec(numbers, len, &Device::Cpu)?;
        let work = self.0.all_reduce(&tensor, ReduceOp::Sum).map_err(candle_core::Error::wrap)?;
        Ok(Box::new(Pending(tensor, work)))
    }
}

impl PendingSum for Pending {
    fn wait(self: Box<Self>) -> candle_core::Result<Vec<f64>> {
        self.1.wait().map_err(candle_core::Error::wrap)?;
        self.0.to_vec1()
    }
}

impl<M: Model> Parallel<M> {
    /// The load of each expert in the last step, by router, in the order of layers; empty without
    /// [`ParallelConfig::balance`](crate::ParallelConfig::balance) or before the first step.
    pub fn expert_loads(&self) -> &[ExpertLoad] {
        &self.routing.loads
    }

    /// With [`ExpertBalance::bias`], moves the correction of each expert by that: up if it had fewer tokens than the mean in the last
    /// step, of all ranks and micro-batches, and down if it had more. A loop of one's own calls it on every rank after the optimizer
    /// has stepped, as the [`Trainer`](crate::trainer::Trainer) does; again, or without a step before, it changes nothing. A step that is
    /// skipped moves nothing.
    ///
    /// # Errors
    /// A router without a correction.
    ///
    /// # Source
    /// Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts" (2024), algorithm 1.
    pub fn move_corrections(&mut self) -> Result<()> {
        let Some(rate) = self.config.balance.and_then(|balance| balance.bias) else { return Ok(()) };
        if !std::mem::take(&mut self.routing.is_new) {
            return Ok(());
        }
        let corrections: HashMap<String, Var> = self.buffers().into_iter().collect();
        for ExpertLoad { router, tokens } in &self.routing.loads {
            let Some(var) = corrections.get(&format!("{router}.{EXPERT_CORRECTION}")) else {
                if self.routing.own.contains(router) {
                    let help = format!("give it one called {EXPERT_CORRECTION}, or balance by a loss");
                    return Err(Error::invalid("a router without a correction", router, help));
                }
                continue;
            };
            let moves = Tensor::from_iter(correction_moves(tokens, rate), &Device::Cpu)?;
            let moved = (var.as_detached_tensor().to_device(&Device::Cpu)?.to_dtype(DType::F64)? + moves)?;
            var.set(&moved.to_dtype(var.dtype())?.to_device(var.device())?)?;
        }
        Ok(())
    }

    /// Makes the balance of a micro-batch of a batch with so many rows on all ranks.
    pub(super) fn balance_of(&self, rows: f64) -> Option<Balance> {
        let ExpertBalance { loss, coefficient, experts, .. } = self.config.balance?;
        let group = |comm: &Arc<dyn Communicator>| -> Option<Arc<dyn RankSum>> {
            (comm.world_size() > 1).then(|| Arc::new(Group(comm.clone())) as Arc<dyn RankSum>)
        };
        let (weight, ranks) = match loss {
            None => (0.0, None),
            Some(BalanceLoss::Row) => {
                let ranks = self.axes.context.as_ref().and_then(|context| group(context.comm()));
                (coefficient / rows, ranks)
            }
            Some(BalanceLoss::Batch) => {
                let ranks = self.axes.undivided.as_ref().and_then(group);
                (coefficient / self.config.micro_batches as f64, ranks)
            }
        };
        let scale = self.scaler.as_ref().map_or(1.0, LossScaler::factor);
        let gradient = scale * self.axes.averaged.world_size() as f64;
        Some(Balance::new(BalanceConfig { loss, weight, gradient, experts, ranks }))
    }

    /// Sums the loss of micro-batches over ranks; 0 without one.
    pub(super) fn balance_loss(&self, parts: &[Balance]) -> Result<f64> {
        Ok(self.sum_undivided(vec![own_loss(parts)?])?[0])
    }

    /// Returns the loss of micro-batches, and keeps the loads, of all ranks.
    pub(crate) fn take_routing(&mut self, parts: &[Balance]) -> Result<Option<f64>> {
        let Some(ExpertBalance { experts, loss, .. }) = self.config.balance else { return Ok(None) };
        let mut own: Vec<(Arc<str>, Vec<f64>)> = Vec::new();
        for (router, load) in parts.iter().flat_map(Balance::loads) {
            match own.iter_mut().find(|(known, _)| *known == router) {
                Some((_, sum)) => sum.iter_mut().zip(load).for_each(|(sum, load)| *sum += load),
                None => own.push((router, load)),
            }
        }
        let routers = match self.routing.routers.take() {
            Some(routers) => routers,
            None => {
                let names: Vec<String> = own.iter().map(|(router, _)| router.to_string()).collect();
                self.routing.own = names.clone();
                let mut all: Vec<String> =
                    all_gather_object(&**self.axes.mesh.axis("pp")?, &names)?.into_iter().flatten().collect();
                all.sort_by_key(|name| by_layer(name));
                all
            }
        };
        let mut numbers = vec![0.0; routers.len() * experts];
        for (router, load) in own {
            let Some(place) = routers.iter().position(|name| **name == *router) else {
                let help = "use the same routers in every step";
                return Err(Error::invalid("a router of the model", router, help));
            };
            numbers[place * experts..][..experts].copy_from_slice(&load);
        }
        numbers.push(own_loss(parts)?);
        let mut numbers = self.sum_undivided(numbers)?;
        let sum = numbers.pop().unwrap_or_default();
        let loads = routers.iter().zip(numbers.chunks(experts.max(1)));
        let of = |(router, tokens): (&String, &[f64])| ExpertLoad {
            router: router.clone(),
            tokens: tokens.to_vec(),
        };
        (self.routing.loads, self.routing.is_new) = (loads.map(of).collect(), true);
        self.routing.routers = Some(routers);
        Ok(loss.map(|_| sum))
    }

    fn sum_undivided(&self, numbers: Vec<f64>) -> Result<Vec<f64>> {
        match self.axes.undivided.as_ref().filter(|comm| comm.world_size() > 1) {
            Some(comm) => Ok(Group(comm.clone()).begin(numbers)?.wait()?),
            None => Ok(numbers),
        }
    }
}

fn own_loss(parts: &[Balance]) -> Result<f64> {
    parts.iter().try_fold(0.0, |sum, part| Ok(sum + part.loss()?))
}

/// Orders names of layers by their numbers.
fn by_layer(name: &str) -> Vec<(u64, String)> {
    let of = |part: &str| match part.parse() {
        Ok(number) => (number, String::new()),
        Err(_) => (u64::MAX, part.to_string()),
    };
    name.split('.').map(of).collect()
}
