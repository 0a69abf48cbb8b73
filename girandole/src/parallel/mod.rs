//! One model in any layout.

mod axes;
mod balance;
mod build;
mod check_gradient;
mod config;
mod elastic;
mod evaluate;
mod far_groups;
mod flat_shards;
mod micro_batches;
mod norm;
mod pieces;
mod preferences;
mod stages;
mod trained;

use std::collections::HashSet;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use candle_nn::VarMap;
use comm::{Communicator, Mesh, Stats};
use ddp::Ddp;
use fsdp::Fsdp;
use ops::RowContext;
use tensor_parallel::Shards;
use training::build::Model;
use training::internal::GradSums;
use training::{LossScaler, OnMissingGradient, named_vars};

use crate::Layout;

pub use balance::{ExpertBalance, ExpertLoad};
pub use config::{IsTrained, ParallelConfig};
pub use far_groups::FarGroups;
pub(crate) use micro_batches::{MicroBatch, Prepared, added, sum};
pub use preferences::PreferenceReport;
pub use stages::StagesForward;

use axes::Axes;
use stages::Stages;
use strategy::{DistributedModel, OwnedMatrices, traffic};

/// A model in a [`Layout`]: this rank's part of it, and its communication with other ranks.
///
/// | axes | implementation |
/// | --- | --- |
/// | none, `tp` | the plain model, with this rank's part of its layers |
/// | `dp`, also with `tp` | [`Ddp`] |
/// | `shard`, also with `dp` (hybrid) and `tp` | [`Fsdp`] |
/// | `cp`, also with all others | as `dp`, or `shard` if there is one: attention exchanges keys and values ([`context_parallel`]) |
/// | `ep`, also with all others | as `dp`, or `shard` if there is one, except for experts: tokens are sent to them and back ([`expert_parallel`]) |
/// | `pp`, also with all others | [`pipeline::Pipeline`]; gradients are averaged over `dp`, `shard` and `ep` |
///
/// With `pp`, `shard` divides the optimizer state and the update: each rank's stages are gathered at the beginning of a
/// step and stay whole until its end, since every micro-batch needs them (ZeRO stage 1).
///
/// # Failure
/// As with the strategies: after a failure ranks are out of step, and every later call fails with the first cause.
pub struct Parallel<M> {
    layout: Layout,
    /// With `far`: the groups of all ranks. Everything else is of this rank's group.
    far: Option<FarGroups>,
    axes: Axes,
    pub(crate) shards: Shards,
    pub(crate) model: Kind<M>,
    config: ParallelConfig,
    ties: Vec<(String, String)>,
    /// The same on every rank.
    pub(crate) scaler: Option<LossScaler>,
    /// Variables whose gradients this rank contributes to the norm of all gradients.
    counted: HashSet<TensorId>,
    /// Number of the next step.
    pub(crate) steps: u64,
    /// Of the experts in the last step.
    routing: balance::Routing,
    /// Whether some attention has asked for the documents of packed rows.
    knows_documents: bool,
    /// The first failure, after which ranks are out of step.
    failed: Option<String>,
    remake: Remake<M>,
}

/// Builds the model again in another group and layout. The values of trained parameters are any.
type Remake<M> =
    Arc<dyn Fn(Arc<dyn Communicator>, &Layout, &ParallelConfig) -> crate::Result<Parallel<M>> + Send + Sync>;

/// The implementation of the layout.
pub(crate) enum Kind<M> {
    /// `unaudited` until the first step has been checked for missing gradients; the strategies check their own.
    Whole {
        model: M,
        vars: VarMap,
        unaudited: bool,
    },
    Copies(Ddp<M>),
    Sharded(Fsdp<M>),
    Stages(Box<Stages>),
}

/// The result of a training step on one rank.
#[derive(Debug)]
pub struct Step {
    /// Mean loss over all targets of all ranks; the same on each.
    pub loss: f64,
    /// Loss that balances experts, with its coefficient: a part of what the gradients are of, but not of `loss`. `None` without
    /// one.
    pub balance_loss: Option<f64>,
    /// Number of targets that counted, on all ranks; of pairs, their number.
    pub targets: usize,
    /// What was found of pairs, if the rows have them.
    pub preferences: Option<PreferenceReport>,
    /// Gradients of this rank's variables for the whole batch, for the optimizer. Empty if the step is skipped.
    pub grads: GradStore,
    /// Whether a gradient was not finite on some rank, with [`ParallelConfig::loss_scale`]: the optimizer must not step
    /// then.
    pub skipped: bool,
}

/// The result of an evaluation, the same on every rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Evaluation {
    /// Mean loss over all targets of all ranks.
    pub loss: f64,
    /// Number of targets that counted, on all ranks; of pairs, their number.
    pub targets: usize,
    /// Sums over these targets that the model adds up ([`Model::evaluate`]).
    pub sums: Vec<f64>,
    /// What was found of pairs, if the rows have them.
    pub preferences: Option<PreferenceReport>,
}

/// What a step changes beside buffers and gradients.
pub(crate) struct BeforeStep {
    on_missing: OnMissingGradient,
    routing: balance::Routing,
    scaler: Option<LossScaler>,
}

impl<M: Model> Parallel<M> {
    /// Returns the layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Returns the layout with all groups of `far` that were there, or were to be, at the beginning of the run.
    pub(crate) fn whole_layout(&self) -> Layout {
        let groups = self.far.as_ref().map_or(1, |far| far.share_of_batch().1);
        Layout { far: groups, ..self.layout }
    }

    /// Returns the groups of a layout with `far`.
    pub fn far(&self) -> Option<&FarGroups> {
        self.far.as_ref()
    }

    /// Returns all ranks of the job: with `far`, those of all groups.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        self.far.as_ref().map_or(self.axes.mesh.world(), |far| &far.world)
    }

    /// Returns the ranks, of this rank's group, with the same part of the model.
    pub(crate) fn copies(&self) -> &Arc<dyn Communicator> {
        self.axes.of_parameters.axis("dp").unwrap_or(self.axes.mesh.world())
    }

    /// Returns which part of a batch is this rank's: its number among those with different rows, and how many these are. With `far`,
    /// each group takes a part of the batch.
    pub fn share_of_batch(&self) -> (usize, usize) {
        let (rank, ranks) = (self.axes.data.rank(), self.axes.data.world_size());
        let (group, groups) = self.far.as_ref().map_or((0, 1), FarGroups::share_of_batch);
        // The rows of a group are the same in every layout of it.
        (rank * groups + group, groups * ranks)
    }

    /// Returns the mesh of this rank's group, with the group along each axis.
    pub fn mesh(&self) -> &Mesh {
        &self.axes.mesh
    }

    /// Returns the group of ranks with different rows (`dp`, `shard` and `ep`); this rank's number in it is the index of its share of a
    /// batch.
    pub fn data_ranks(&self) -> &Arc<dyn Communicator> {
        &self.axes.data
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ParallelConfig {
        &self.config
    }

    /// Returns the loss scaler, if losses are scaled.
    pub fn loss_scaler(&self) -> Option<&LossScaler> {
        self.scaler.as_ref()
    }

    /// Sets the number of the next step, which determines the random numbers of rows ([`RowKeys`](ops::RowKeys)),
    /// such as dropout's. By default steps count from 0; a run that resumes from a checkpoint, or repeats a step, must
    /// set it. The same on every rank.
    pub fn set_next_step(&mut self, step: u64) {
        self.steps = step;
    }

    /// Returns the model, for computing with it directly: with the same input on all ranks if layers are divided or
    /// sharded. `None` with `pp`, where no rank has all of it.
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

    /// What the rows of a prompt of `len` tokens are computed with, where [`model`](Self::model) computes directly: in its scope
    /// `models::generate` divides the prompt over the ranks of `cp`. Without `cp`, or with fewer tokens than ranks, it divides
    /// nothing.
    ///
    /// # Errors
    /// Those of [`ContextParallel::divide`](context_parallel::ContextParallel::divide).
    pub fn prompt_context(&self, len: usize) -> crate::Result<RowContext> {
        Ok(RowContext { divided: self.axes.divide_prompt(len)?, ..RowContext::default() })
    }

    /// Returns the trained variables with their names, for an optimizer: parameters, or this rank's parts of them.
    /// Variables that are not trained have no gradient, and are in no checkpoint.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        let mut vars = self.model_vars();
        vars.retain(|(name, _)| self.config.is_trained(name));
        vars
    }

    /// Returns variables that are state and not parameters, such as running statistics, with their names: whole on
    /// every rank, and local to it. Checkpoints hold those of the first rank. With copies the first rank's are copied
    /// to all ranks after each step (`DdpConfig::broadcast_buffers`); with `shard` and with `pp` each rank keeps its
    /// own, as `Fsdp` does.
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

    /// Returns the variables of parameters; if the model is sharded, also those that are not trained.
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

    /// Applies [`ParallelConfig::audit`](ParallelConfig) once to a model that no strategy wraps. All ranks along `tp` have
    /// gradients of the same parameters.
    pub(crate) fn audit(&mut self, grads: &GradStore) -> crate::Result<()> {
        let Kind::Whole { unaudited, .. } = &mut self.model else { return Ok(()) };
        if !std::mem::take(unaudited) {
            return Ok(());
        }
        let vars = self.named_vars();
        let floats = vars.iter().filter(|(_, var)| var.dtype().is_float());
        let parameters = floats.map(|(name, var)| (name.as_str(), var.dims(), grads.get(var).is_some()));
        Ok(self.config.audit.act("Parallel", self.axes.mesh.axis("tp")?.rank() == 0, parameters)?)
    }

    /// Takes what a step changes beside buffers and gradients, so that the last step can be computed once more; missing gradients, which
    /// were reported then, are not again.
    pub(crate) fn before_step(&mut self) -> BeforeStep {
        let on_missing = std::mem::replace(&mut self.config.audit.on_missing, OnMissingGradient::Ignore);
        self.steps = self.steps.saturating_sub(1);
        BeforeStep { on_missing, routing: self.routing.clone(), scaler: self.scaler.clone() }
    }

    /// The inverse of [`before_step`](Self::before_step), after the step.
    pub(crate) fn restore(&mut self, before: BeforeStep) {
        (self.config.audit.on_missing, self.routing, self.scaler) =
            (before.on_missing, before.routing, before.scaler);
    }

    /// Divides scaled gradients by the loss scale. Returns false, and empty gradients, if one was not finite on some
    /// rank.
    pub(crate) fn unscale(&mut self, grads: &mut GradStore) -> crate::Result<bool> {
        let Some(mut scaler) = self.scaler.take() else { return Ok(true) };
        let is_finite = scaler.unscale(self, grads);
        self.scaler = Some(scaler);
        let is_finite = is_finite?;
        if !is_finite {
            *grads = GradSums::default().finish()?;
        }
        Ok(is_finite)
    }

    /// Whether a parameter has several dimensions: weights of layers and embeddings, which usually get weight decay,
    /// unlike biases and norms.
    pub fn is_matrix(&self, name: &str) -> bool {
        self.shards.held(name).is_some_and(|(dims, _)| dims.len() > 1)
    }

    /// Brings matrices together for an optimizer that needs them whole, such as [`training::Muon`]: those of the trained variables
    /// for whose names `is_matrix` is true. Call it on every rank, also on one that has none, and again after ranks were lost or
    /// have joined.
    ///
    /// # Errors
    /// Those of [`OwnedMatrices::new`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use girandole::comm::Local;
    /// use girandole::models::{CausalLm, ModelConfig, Weights};
    /// use girandole::training::{Muon, MuonConfig, StepOptimizer};
    /// use girandole::{InitialWeights, Parallel, ParallelConfig};
    ///
    /// let config = r#"{"model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 32,
    ///     "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}"#;
    /// Local::run_shared(2, |comm| {
    ///     let model = ModelConfig::from_json(config).map_err(girandole::Error::from)?;
    ///     let weights: InitialWeights = Weights::random(&model, 1).map_err(girandole::Error::from)?.parts().into();
    ///     let build = move |builder: &girandole::training::build::Builder| CausalLm::new(&model, builder);
    ///     let mut parallel = Parallel::new(comm, &"shard=2".parse()?, weights, &ParallelConfig::default(), build)?;
    ///     let is_hidden = |name: &str| name.contains("_proj.weight");
    ///     let mut matrices = parallel.whole_matrices(is_hidden)?;
    ///     let mut muon = Muon::named(parallel.named_vars(), is_hidden, MuonConfig::default()).map_err(girandole::Error::from)?;
    ///     let tokens = Tensor::arange(0u32, 8, &Device::Cpu)?.reshape((1, 8))?;
    ///     let step = parallel.step(&tokens, &tokens)?;
    ///     muon.step_whole(&step.grads, 1.0, &mut matrices)?;
    ///     Ok(())
    /// })?;
    /// # Ok::<(), girandole::comm::Error>(())
    /// ```
    pub fn whole_matrices(&self, is_matrix: impl Fn(&str) -> bool) -> crate::Result<OwnedMatrices> {
        Ok(OwnedMatrices::new(self.axes.mesh.world().clone(), &self.pieces()?, is_matrix)?)
    }

    /// Returns what this rank has sent and received for the model.
    pub fn stats(&self) -> Stats {
        let Axes { of_parameters: mesh, averaged, context, experts, .. } = &self.axes;
        let axis = |name| mesh.axis(name).ok();
        let common = axis("tp")
            .into_iter()
            .chain(self.far.as_ref().map(|far| &far.across))
            .chain(context.as_ref().map(|rows| rows.comm()))
            .chain(experts.as_ref().map(|experts| experts.comm()));
        match &self.model {
            Kind::Whole { .. } => traffic(common),
            Kind::Copies(ddp) => traffic(common.chain(ddp.groups())),
            Kind::Sharded(fsdp) => traffic(common.chain(fsdp.groups())),
            // Stages exchange in groups of their own, too; these are for sums over stages, and over copies.
            Kind::Stages(stages) => {
                let sums = common.chain(axis("pp")).chain([averaged]).chain(stages.shard_group());
                stages.stats() + traffic(sums)
            }
        }
    }
}

impl<M> std::fmt::Debug for Parallel<M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Parallel({})", self.layout)
    }
}
