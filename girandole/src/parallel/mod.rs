//! One model in any layout.

mod build;
mod config;
mod elastic;
mod flat_shards;
mod forward;
mod norm;
mod pieces;
mod stages;
mod step;
mod trained;

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use candle_nn::VarMap;
use comm::{Communicator, Mesh, Stats};
use ddp::Ddp;
use fsdp::Fsdp;
use tensor_parallel::Shards;
use training::build::Model;
use training::{LossScaler, named_vars};

use crate::Layout;

pub use config::{IsTrained, ParallelConfig};
pub use forward::StagesForward;
pub use pieces::Piece;

use stages::Stages;

/// A model in a [`Layout`]: this rank's part of it, and what this rank exchanges with others.
///
/// | axes | what it is made of |
/// | --- | --- |
/// | none, `tp` | the model as it is, with this rank's part of its layers |
/// | `dp`, also with `tp` | [`Ddp`] |
/// | `shard`, also with `dp` (hybrid) and `tp` | [`Fsdp`] |
/// | `pp`, also with all others | [`pipeline::Pipeline`]; gradients are averaged over `dp` and `shard` |
///
/// With `pp`, `shard` divides what the optimizer keeps and changes: each rank's stages are gathered at the beginning of a step and stay whole
/// until its end, since every micro-batch needs them (ZeRO's first stage).
///
/// # Failure
/// As the strategies: after a failure ranks are out of step, and every later call fails with the first cause.
pub struct Parallel<M> {
    layout: Layout,
    mesh: Mesh,
    /// Ranks with other rows.
    data: Arc<dyn Communicator>,
    shards: Shards,
    model: Kind<M>,
    config: ParallelConfig,
    ties: Vec<(String, String)>,
    /// The same on every rank.
    scaler: Option<LossScaler>,
    /// Of which the norm of all gradients counts this rank's.
    counted: HashSet<TensorId>,
    /// The next step's number.
    steps: u64,
    /// The first failure, after which ranks are out of step.
    failed: Option<String>,
}

/// What a model is made of.
enum Kind<M> {
    Whole { model: M, vars: VarMap },
    Copies(Ddp<M>),
    Sharded(Fsdp<M>),
    Stages(Box<Stages>),
}

/// What a step gives a rank.
#[derive(Debug)]
pub struct Step {
    /// The mean loss over all targets of all ranks: the same on each.
    pub loss: f64,
    /// How many targets that are.
    pub targets: usize,
    /// The gradients of this rank's variables, as of the whole batch: for the optimizer. None where the step is skipped.
    pub grads: GradStore,
    /// Whether a gradient was not finite on some rank, with [`ParallelConfig::loss_scale`]: an optimizer changes nothing then.
    pub skipped: bool,
}

/// What an evaluation gives every rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Evaluation {
    /// The mean loss over all targets of all ranks.
    pub loss: f64,
    /// How many targets that are.
    pub targets: usize,
}

impl<M: Model> Parallel<M> {
    /// How ranks are laid out.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The ranks along each axis.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// The ranks that are given different rows: this rank's number in the group is that of its share of a batch.
    pub fn data_ranks(&self) -> &Arc<dyn Communicator> {
        &self.data
    }

    /// How it was built.
    pub fn config(&self) -> &ParallelConfig {
        &self.config
    }

    /// What finds the factor of losses, where they are scaled.
    pub fn loss_scaler(&self) -> Option<&LossScaler> {
        self.scaler.as_ref()
    }

    pub(crate) fn loss_scaler_mut(&mut self) -> Option<&mut LossScaler> {
        self.scaler.as_mut()
    }

    /// Numbers the next step: rows have the random numbers of this step ([`RowKeys`](training::RowKeys)), dropout's for one. Steps count from 0 by
    /// themselves; a run that goes on from a checkpoint, or takes a step again, says which it is. The same on every rank.
    pub fn set_next_step(&mut self, step: u64) {
        self.steps = step;
    }

    /// The model, to compute with as on one rank: on all ranks with the same input where layers are divided or sharded. None with `pp`, where no
    /// rank has all of it.
    ///
    /// # Errors
    /// The cause, if an earlier call failed.
    pub fn model(&self) -> crate::Result<Option<&M>> {
        self.check()?;
        Ok(match &self.model {
            Kind::Whole { model, .. } => Some(model),
            Kind::Copies(ddp) => Some(ddp.model()?),
            Kind::Sharded(fsdp) => Some(fsdp.model()?),
            Kind::Stages(_) => None,
        })
    }

    /// The variables that are trained, with their names, for an optimizer: parameters, or this rank's parts of them. What is not trained has no
    /// gradient, and is in no checkpoint.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        let mut vars = self.model_vars();
        vars.retain(|(name, _)| self.config.is_trained(name));
        vars
    }

    /// Variables that are state and not parameters, such as running statistics, with their names: whole on every rank, and this rank's own.
    /// Checkpoints keep the first rank's. With copies they are the first one's after each step (`DdpConfig::broadcast_buffers`); with `shard` and
    /// with `pp` each rank goes on with its own, as `Fsdp` does.
    pub fn buffers(&self) -> Vec<(String, Var)> {
        match &self.model {
            Kind::Whole { vars, .. } => {
                named_vars(vars).into_iter().filter(|(name, _)| self.config.is_buffer(name)).collect()
            }
            Kind::Copies(ddp) => ddp.buffers().to_vec(),
            Kind::Sharded(fsdp) => fsdp.buffers().to_vec(),
            Kind::Stages(stages) => stages.buffers().to_vec(),
        }
    }

    /// Variables of parameters; where the model is sharded, of what is not trained as well.
    fn model_vars(&self) -> Vec<(String, Var)> {
        match &self.model {
            Kind::Whole { vars, .. } => {
                named_vars(vars).into_iter().filter(|(name, _)| !self.config.is_buffer(name)).collect()
            }
            Kind::Copies(ddp) => ddp.named_vars(),
            Kind::Sharded(fsdp) => fsdp.named_vars(),
            Kind::Stages(stages) => stages.named_vars(),
        }
    }

    /// The first failure, if there was one.
    fn check(&self) -> crate::Result<()> {
        self.failed.as_ref().map_or(Ok(()), |first| Err(crate::Error::Failed { first: first.clone() }))
    }

    /// Whether a parameter has several dimensions: weights of layers and embeddings, which usually decay, where biases and norms do not.
    pub fn is_matrix(&self, name: &str) -> bool {
        self.shards.held(name).is_some_and(|(dims, _)| dims.len() > 1)
    }

    /// What this rank has sent and received for the model.
    pub fn stats(&self) -> Stats {
        let of = |comm: &Arc<dyn Communicator>| comm.stats();
        let tp = self.mesh.axis("tp").map(of).unwrap_or_default();
        tp + match &self.model {
            Kind::Whole { .. } => Stats::default(),
            Kind::Copies(ddp) => ddp.stats(),
            Kind::Sharded(fsdp) => fsdp.stats(),
            Kind::Stages(stages) => stages.stats(),
        }
    }
}

impl<M> std::fmt::Debug for Parallel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parallel({})", self.layout)
    }
}
