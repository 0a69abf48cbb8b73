//! The wrapper around a model.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, Var};
use candle_nn::{Module, ModuleT, VarBuilder};
use comm::{Communicator, Mesh, Stats, line_difference};
use training::AuditConfig;

use crate::builder::UnitBuilder;
use crate::built::{Built, Model};
use crate::clip::Norm;
use crate::core::Core;
use crate::groups::Groups;
use crate::sharding::Plan;
use crate::storage::is_trainable;
use crate::{Error, FsdpConfig, Memory, Result, lock};

/// A model of which every rank keeps a part, and which is whole nowhere.
///
/// # Memory
/// Per rank, with P ranks and full sharding: 1/P of the parameters, of their gradients and of the optimizer's state; and of
/// two units the parameters, and the gradients, whole. [`Fsdp::memory`] counts them.
///
/// # Failure
/// When a call fails after which ranks may be out of step, every later call fails at once with the same cause. The shards are
/// as they were before the failed call.
pub struct Fsdp<M> {
    model: M,
    core: Arc<Core>,
    pub(crate) norm: Norm,
}

impl<M> Fsdp<M> {
    /// Builds the model with `build`, on every rank, sharded over the ranks of `comm`.
    ///
    /// `vb` says what parameters start from; it must give the same values on every rank, which is checked. It should keep
    /// nothing itself: a `VarMap` keeps everything. `training::TorchInit::tensor_builder` draws PyTorch's initial values, as
    /// one process would, and keeps none. Every parameter is whole for a moment while its unit is built. Where parts of parameters can
    /// be read, [`UnitBuilder::reading`] reads what each rank keeps, and no more.
    ///
    /// # Cost
    /// Each rank draws or reads all values, unless it reads parts; a few bytes of each rank are compared.
    ///
    /// # Errors
    /// What `build` fails with, on every rank, on this one or another; units that cannot be sharded; on every rank the first thing in which
    /// the ranks' models or values differ; failures of communication.
    pub fn new<'a>(
        comm: Arc<dyn Communicator>,
        vb: VarBuilder<'a>,
        config: &FsdpConfig,
        build: impl FnOnce(UnitBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(Groups::flat(comm, config.strategy), vb, config, build)
    }

    /// Shards along the axis `shard` of a mesh, and has copies of each shard along the axis `replicate`: parameters are
    /// gathered within `shard` only, and gradients are averaged over both. Other axes of the mesh are not this model's: for each
    /// place along them there is a model of its own, with a rank 0 of its own, whose checkpoints need a folder of their own.
    ///
    /// # Cost
    /// That of [`Fsdp::new`]; where the mesh has other axes, a group of the ranks of both.
    ///
    /// # Errors
    /// An axis that the mesh does not have, one axis for both, [`crate::Strategy::NoShard`]; those of [`Fsdp::new`].
    pub fn hybrid<'a>(
        mesh: &Mesh,
        (shard, replicate): (&str, &str),
        vb: VarBuilder<'a>,
        config: &FsdpConfig,
        build: impl FnOnce(UnitBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(Groups::hybrid(mesh, shard, replicate, config.strategy)?, vb, config, build)
    }

    fn build<'a>(
        groups: Groups,
        vb: VarBuilder<'a>,
        config: &FsdpConfig,
        build: impl FnOnce(UnitBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        check_dtypes(config)?;
        let plan = Arc::new(Plan {
            config: config.clone(),
            shards: groups.shards(),
            shard_rank: groups.shard_rank(),
            has_copies: groups.replicate.is_some(),
            link: Arc::new(OnceLock::new()),
            anchor: Var::zeros(1, DType::F32, vb.device())?,
            model: Mutex::default(),
        });
        let built = build(UnitBuilder::new(vb, plan.clone()));
        let parts = std::mem::take(&mut *lock(&plan.model));
        let built = built.map_err(Error::during("building the model"));
        // What is read may fail on one rank alone.
        let peer_failed = |rank, reason| Error::PeerFailed { rank, reason };
        let model = comm::all_agree([&*groups.world as &dyn Communicator], built, peer_failed)?;
        let mut difference = line_difference(&*groups.world, 0, &describe(&parts, config))?;
        let kept = describe_kept(&parts);
        if difference.is_none() && !kept.is_empty() {
            // Ranks with the same part.
            difference = line_difference(&*groups.world, groups.shard_rank(), &kept)?;
        }
        if let Some(difference) = difference {
            return Err(Error::ModelMismatch(difference));
        }
        let core = Arc::new(Core::new(groups, config.clone(), parts));
        // A new link, so it is not set yet.
        let _ = plan.link.set(Arc::downgrade(&core));
        Ok(Self { model, core, norm: Norm::default() })
    }

    /// The model, before a forward pass: units that are still gathered are released, since an optimizer may have changed
    /// their shards.
    ///
    /// # Errors
    /// The cause, if an earlier call failed.
    pub fn model(&self) -> Result<&M> {
        self.core.begin_forward()?;
        Ok(&self.model)
    }

    /// This rank's shards, for an optimizer: for each parameter, in order of construction, a flat variable of the elements that this
    /// rank keeps. It may have some more, which are padding and stay zero: every rank has a variable of every parameter.
    pub fn vars(&self) -> Vec<Var> {
        self.core.params().map(|param| param.shard.clone()).collect()
    }

    /// The same with the parameters' names, for an optimizer whose state is saved, or one of some of the parameters.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.core.params().map(|param| (param.name.clone(), param.shard.clone())).collect()
    }

    /// For each variable of [`Fsdp::named_vars`], the elements of the flat parameter that it begins with; what it has beyond them is padding.
    pub fn shard_ranges(&self) -> Vec<std::ops::Range<usize>> {
        let units = self.core.units.iter();
        units.flat_map(|unit| (0..unit.params.len()).map(|param| unit.kept(param))).collect()
    }

    /// Variables that are state and not parameters ([`FsdpConfig::buffers`]), by name. They are this rank's own.
    pub fn buffers(&self) -> &[(String, Var)] {
        &self.core.buffers
    }

    /// Backward from `loss`, on every rank; the result holds, by the variables of [`Fsdp::vars`], this rank's part of the mean
    /// over ranks of the gradients, those of [`Fsdp::backward_no_sync`] since the last call added.
    ///
    /// A parameter that no rank's loss depends on has no gradient on any rank, and optimizers leave it alone; where some ranks'
    /// losses do, it counts as zero on the others. Every rank must use the same units.
    ///
    /// # Cost
    /// For each unit an all-gather of its parameters, under way while the unit after it is computed, and a reduce-scatter of
    /// its gradients, under way while the unit before it is. Then 8 bytes of each rank, and a bit for each parameter.
    ///
    /// # Errors
    /// What candle's backward fails with; [`Error::OrderMismatch`]; failures of communication. After any of them the `Fsdp` is
    /// of no use any more.
    ///
    /// # Source
    /// Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO",
    /// SC 2020.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.core.backward(loss, true)
    }

    /// Backward from `loss` on this rank alone: adds the gradients to those that the next [`Fsdp::backward`] averages.
    ///
    /// They are summed and not averaged over such calls: for the mean over k micro-batches, divide each loss by k. The shards
    /// must not change before that call.
    ///
    /// # Cost
    /// Gradients are not communicated, and whole until then, in f32 (f64 where that is computed in): as much memory as the
    /// parameters take. Parameters are gathered,
    /// unless they are kept ([`crate::Strategy::ShardGradOp`], [`crate::UnitConfig`]): these stay until the next
    /// [`Fsdp::backward`].
    ///
    /// # Errors
    /// As [`Fsdp::backward`].
    pub fn backward_no_sync(&self, loss: &Tensor) -> Result<()> {
        self.core.backward(loss, false).map(drop)
    }

    /// What this rank holds of parameters and gradients, and has held at most.
    pub fn memory(&self) -> Memory {
        self.core.memory()
    }

    /// Bytes that backward from `loss` will need of what the layers have computed, beside the parameters: each storage once, and
    /// only those that gradients flow through (a model's input is the caller's).
    pub fn activation_bytes(&self, loss: &Tensor) -> usize {
        let params = self.core.units.iter().flat_map(|unit| &unit.params);
        training::activation_bytes(loss, params.map(|param| &param.tensor))
    }

    /// What this rank has sent and received so far: along with the ranks that have other parts, those that have the same, and all.
    pub fn stats(&self) -> Stats {
        self.core.groups.stats()
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }
}

impl<M: Module> Module for Fsdp<M> {
    fn forward(&self, input: &Tensor) -> candle_core::Result<Tensor> {
        self.output(self.model()?.forward(input)?)
    }
}

impl<M: ModuleT> Fsdp<M> {
    /// Forward of a model that does something else in training than in evaluation.
    ///
    /// # Errors
    /// Those of [`Fsdp::model`] and of the model.
    pub fn forward_t(&self, input: &Tensor, train: bool) -> candle_core::Result<Tensor> {
        self.output(self.model()?.forward_t(input, train)?)
    }
}

impl<M> Fsdp<M> {
    fn output(&self, output: Tensor) -> candle_core::Result<Tensor> {
        match self.core.config.mixed_precision.output_dtype {
            Some(dtype) => output.to_dtype(dtype),
            None => Ok(output),
        }
    }
}

impl<M> fmt::Debug for Fsdp<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fsdp({} units on {:?})", self.core.units.len(), self.core.groups.world)
    }
}

fn check_dtypes(config: &FsdpConfig) -> Result<()> {
    let mixed = &config.mixed_precision;
    let fields = [
        ("param_dtype", mixed.param_dtype),
        ("reduce_dtype", mixed.reduce_dtype),
        ("output_dtype", mixed.output_dtype),
        ("buffer_dtype", config.buffer_dtype),
    ];
    for (field, dtype) in fields {
        if let Some(dtype) = dtype.filter(|&dtype| !is_trainable(dtype)) {
            return Err(Error::InvalidDtype { field, dtype });
        }
    }
    Ok(())
}

/// What must be equal on all ranks, one line for each thing.
fn describe(model: &Model, config: &FsdpConfig) -> Vec<String> {
    let FsdpConfig { strategy, mixed_precision, pack_elements, buffer_dtype, audit, .. } = config;
    let mut lines = vec![format!(
        "{strategy:?}, {mixed_precision:?}, buffers in {buffer_dtype:?}, small: below {pack_elements} elements"
    )];
    if *audit != AuditConfig::default() {
        lines.push(format!("missing gradients: {audit:?}"));
    }
    for unit in &model.units {
        let Built { name, params, keep, digest, .. } = unit;
        lines.push(format!("unit {name} of {:?}, kept after forward: {keep}", unit.shard_dtype()));
        for param in params {
            lines.push(format!("parameter {} {:?}", param.name, param.tensor.dims()));
        }
        let values = if unit.is_read { "that read first values" } else { "with values" };
        lines.push(format!("unit {name} {values} of hash {:016x}", digest.value()));
    }
    lines
}

/// What must be equal on all ranks that keep the same part.
fn describe_kept(model: &Model) -> Vec<String> {
    let units = model.units.iter().filter(|unit| unit.is_read);
    let units = units.filter_map(|unit| Some((&unit.name, unit.kept_digest?)));
    units
        .map(|(name, digest)| format!("unit {name} that read values of hash {:016x}", digest.value()))
        .collect()
}
