//! `Fsdp`: the wrapper around a sharded model.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Module, ModuleT, VarBuilder};
use comm::internal::{Digest, line_difference};
use comm::{Communicator, Mesh, Stats};
use strategy::{ParameterGroups, traffic};
use training::AuditConfig;

use crate::builder::UnitBuilder;
use crate::built::{BuiltUnit, Model};
use crate::core::Core;
use crate::groups::Groups;
use crate::sharding::Plan;
use crate::storage::is_trainable;
use crate::{Error, FsdpConfig, Memory, Result, ShardingStrategy, lock};

/// A model of which every rank keeps a shard.
///
/// # Memory
/// Per rank, with P ranks and full sharding: 1/P of the parameters, of their gradients and of the optimizer state; and the
/// whole parameters and gradients of two units. [`Fsdp::memory`] counts them.
///
/// # Failure
/// If a call fails and ranks may be out of step, every later call fails immediately with the same cause. The shards are as
/// they were before the failed call.
pub struct Fsdp<M> {
    model: M,
    core: Arc<Core>,
    pub(crate) norm: Norm,
}

/// Which gradients the global norm covers beyond this model's own, and which of this model's it omits.
#[derive(Default)]
pub(crate) struct Norm {
    /// Groups whose ranks hold other parts of a larger model.
    pub(crate) others: Vec<Arc<dyn Communicator>>,
    /// This rank's shards that are counted; `None`: all of them.
    pub(crate) counted: Option<Vec<Var>>,
}

impl<M> Fsdp<M> {
    /// Builds the model with `build`, on every rank, sharded over the ranks of `comm`.
    ///
    /// `vb` supplies the initial values; it must return the same values on every rank, which is checked. It should retain
    /// nothing: a `VarMap` retains everything. `training::TorchInit::tensor_builder` draws PyTorch's initial values, as a
    /// single process would, and retains none. Every parameter is briefly whole while its unit is built. If the source can
    /// read ranges of parameters, [`UnitBuilder::reading`] reads only what each rank keeps.
    ///
    /// # Cost
    /// Each rank draws or reads all values, or with a range source only its own; a few bytes of each rank are compared.
    ///
    /// # Errors
    /// On every rank: errors of `build` on this rank or another; units that cannot be sharded; the first difference between
    /// the ranks' models or values. Failures of communication.
    pub fn new<'a>(
        comm: Arc<dyn Communicator>,
        vb: VarBuilder<'a>,
        config: &FsdpConfig,
        build: impl FnOnce(UnitBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(Groups::flat(comm, config.strategy), vb, config, build)
    }

    /// Shards along the axis `shard` of a mesh, and replicates each shard along the axis `dp`: parameters are gathered
    /// within `shard` only, and gradients are averaged over both. For each position along the other axes of the mesh there is
    /// a separate model, with its own rank 0, whose checkpoints need their own folder.
    ///
    /// # Cost
    /// That of [`Fsdp::new`]; if the mesh has other axes, also the creation of a group of the ranks of both axes.
    ///
    /// # Errors
    /// An axis that the mesh does not have, one axis for both, [`crate::ShardingStrategy::NoShard`]; those of [`Fsdp::new`].
    pub fn hybrid<'a>(
        mesh: &Mesh,
        (shard, dp): (&str, &str),
        vb: VarBuilder<'a>,
        config: &FsdpConfig,
        build: impl FnOnce(UnitBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        Self::build(Groups::hybrid(mesh, shard, dp, config.strategy)?, vb, config, build)
    }

    /// Shards over the ranks of `shard`, with other ranks that hold the same shards, and with parameters that only some of all
    /// ranks have, such as experts. `averaged_over` are all ranks that have a part of a parameter, and `same_shard` those of them that have
    /// the same shard of it. [`Fsdp::pieces`](strategy::DistributedModel::pieces), and so the norm and checkpoints, are those of
    /// this rank's parameters alone: who divides parameters over ranks knows what each has.
    ///
    /// # Errors
    /// [`crate::ShardingStrategy::NoShard`]; those of [`Fsdp::new`].
    pub fn with_groups<'a>(
        shard: Arc<dyn Communicator>,
        averaged_over: ParameterGroups,
        same_shard: ParameterGroups,
        vb: VarBuilder<'a>,
        config: &FsdpConfig,
        build: impl FnOnce(UnitBuilder<'a>) -> candle_core::Result<M>,
    ) -> Result<Self> {
        if config.strategy == ShardingStrategy::NoShard {
            return Err(Error::NothingSharded { axis: "shard".into() });
        }
        Self::build(Groups::new(Some(shard), averaged_over, Some(same_shard)), vb, config, build)
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
            has_copies: groups.same_shard.is_some(),
            averaged_over: groups.averaged_over.clone(),
            link: Arc::new(OnceLock::new()),
            anchor: Var::zeros(1, DType::F32, vb.device())?,
            model: Mutex::default(),
        });
        let built = build(UnitBuilder::new(vb, plan.clone()));
        let parts = std::mem::take(&mut *lock(&plan.model));
        let built = built.map_err(Error::during("building the model"));
        // Reading may fail on one rank alone.
        let all = [&**groups.world() as &dyn Communicator];
        let model = strategy::all_agree_with(all, built, peer_failed)?;
        let of_group = |group| describe(&parts, config, &groups.averaged_over, group);
        let described: Result<Vec<_>> = (0..groups.averaged_over.groups().count()).map(of_group).collect();
        check_equal(&groups.averaged_over, 0, &strategy::all_agree_with(all, described, peer_failed)?)?;
        // Compared among the ranks that keep the same shard.
        let kept = (0..groups.averaged_over.groups().count()).map(|group| describe_kept(&parts, group));
        check_equal(&groups.averaged_over, groups.shard_rank(), &kept.collect::<Vec<_>>())?;
        let core = Arc::new(Core::new(groups, config.clone(), parts));
        // The link was created above, so it is not set yet.
        let _ = plan.link.set(Arc::downgrade(&core));
        Ok(Self { model, core, norm: Norm::default() })
    }

    /// Starts a forward pass and returns the model: units that are still gathered are released, since an optimizer may have
    /// changed their shards.
    ///
    /// # Errors
    /// The first cause, if an earlier call failed.
    pub fn model(&self) -> Result<&M> {
        self.core.begin_forward()?;
        Ok(&self.model)
    }

    /// Returns this rank's shards, for an optimizer: for each parameter, in order of construction, a flat variable of the
    /// elements that this rank keeps. It may end with padding, which stays zero: every rank has a variable for every
    /// parameter.
    pub fn vars(&self) -> Vec<Var> {
        self.core.params().map(|param| param.shard.clone()).collect()
    }

    /// Returns the same with the parameters' names: for an optimizer whose state is saved, or one that updates only some
    /// parameters.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.core.params().map(|param| (param.name.clone(), param.shard.clone())).collect()
    }

    /// Returns, for each variable of [`Fsdp::named_vars`], the range of the flat parameter that it starts with; the rest of
    /// the variable is padding.
    pub fn shard_ranges(&self) -> Vec<std::ops::Range<usize>> {
        let units = self.core.units.iter();
        units.flat_map(|unit| (0..unit.params.len()).map(|param| unit.kept(param))).collect()
    }

    /// Returns the variables that are state and not parameters ([`FsdpConfig::buffers`]), by name. Each rank has its own.
    pub fn buffers(&self) -> &[(String, Var)] {
        &self.core.buffers
    }

    /// Runs backward from `loss`, on every rank. The result holds, keyed by the variables of [`Fsdp::vars`], this rank's
    /// shard of the gradients averaged over ranks, including those of [`Fsdp::backward_no_sync`] since the last call.
    ///
    /// A parameter that no rank's loss depends on has no gradient on any rank, and optimizers do not change it; if only some
    /// ranks' losses depend on it, it counts as zero on the others. Every rank must use the same units.
    ///
    /// # Cost
    /// For each unit an all-gather of each of its large parameters and one of the small ones together, overlapped with the computation of the unit after it, and a
    /// reduce-scatter of its gradients, overlapped with that of the unit before it. Then 8 bytes per rank, and one bit per
    /// parameter.
    ///
    /// # Errors
    /// Errors of candle's backward; [`Error::OrderMismatch`]; failures of communication. After any of them the `Fsdp` is
    /// unusable.
    ///
    /// # Source
    /// Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO",
    /// SC 2020.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        self.core.backward(loss, true)
    }

    /// Runs backward from `loss` without communicating gradients: adds them to those that the next [`Fsdp::backward`]
    /// averages.
    ///
    /// Gradients of such calls are summed, not averaged: for the mean over k micro-batches, divide each loss by k. The shards
    /// must not change before the next [`Fsdp::backward`].
    ///
    /// # Cost
    /// Gradients are not communicated, and are kept whole until then, in f32 (f64 if computed in f64): as much memory as the
    /// parameters take. Parameters are gathered, unless they are kept ([`crate::ShardingStrategy::ShardGradOp`],
    /// [`crate::UnitConfig`]), in which case they stay until the next [`Fsdp::backward`].
    ///
    /// # Errors
    /// As [`Fsdp::backward`].
    pub fn backward_no_sync(&self, loss: &Tensor) -> Result<()> {
        self.core.backward(loss, false).map(drop)
    }

    /// Returns the current and peak bytes of parameters and gradients on this rank.
    pub fn memory(&self) -> Memory {
        self.core.memory()
    }

    /// Returns the bytes of activations that backward from `loss` will need, parameters excluded: each storage once, and only
    /// those that gradients flow through (a model's input belongs to the caller).
    pub fn activation_bytes(&self, loss: &Tensor) -> usize {
        let params = self.core.units.iter().flat_map(|unit| &unit.params);
        ops::activation_bytes(loss, params.map(|param| &param.tensor))
    }

    /// Returns this rank's traffic so far, over all groups: shard group, replica group, and all ranks.
    pub fn stats(&self) -> Stats {
        traffic(self.groups())
    }

    /// The groups in which this rank communicates. Several of them may be the same communicator.
    pub fn groups(&self) -> impl Iterator<Item = &Arc<dyn Communicator>> {
        self.core.groups.all()
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
    /// Runs forward of a model that behaves differently in training and in evaluation.
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
        write!(f, "Fsdp({} units on {:?})", self.core.units.len(), self.core.groups.world())
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

/// Checks that the lines of each group are equal on its ranks of the same number. Every rank must call it.
fn check_equal(averaged_over: &ParameterGroups, number: usize, lines: &[Vec<String>]) -> Result<()> {
    let mut difference = None;
    for (comm, lines) in averaged_over.groups().zip(lines).filter(|(_, lines)| !lines.is_empty()) {
        let found = line_difference(&**comm, number, lines)?;
        difference = difference.or(found);
    }
    let checked = difference.map_or(Ok(()), |difference| Err(Error::ModelMismatch(difference)));
    match lines.len() {
        1 => checked,
        _ => strategy::all_agree_with([&**averaged_over.all() as &dyn Communicator], checked, peer_failed),
    }
}

fn peer_failed(rank: usize, reason: String) -> Error {
    Error::PeerFailed { rank, reason }
}

/// Describes what must be equal on all ranks of a group, one line per item.
fn describe(
    model: &Model,
    config: &FsdpConfig,
    averaged_over: &ParameterGroups,
    group: usize,
) -> Result<Vec<String>> {
    let FsdpConfig { strategy, mixed_precision, pack_elements, buffer_dtype, audit, .. } = config;
    let mut lines = vec![format!(
        "{strategy:?}, {mixed_precision:?}, buffers in {buffer_dtype:?}, small: below {pack_elements} elements"
    )];
    if *audit != AuditConfig::default() {
        lines.push(format!("missing gradients: {audit:?}"));
    }
    for unit in &model.units {
        let BuiltUnit { name, params, keep, digests, .. } = unit;
        lines.push(format!("unit {name} of {:?}, kept after forward: {keep}", unit.shard_dtype()));
        for param in params.iter().filter(|param| averaged_over.index_of(&param.name) == group) {
            lines.push(format!("parameter {} {:?}", param.name, param.tensor.dims()));
        }
        let values = if unit.is_read { "that read first values" } else { "with values" };
        lines.push(format!("unit {name} {values} of hash {:016x}", digests[group].value()));
    }
    for (name, var) in model.buffers.iter().filter(|_| group == 0) {
        // On the host: not every device has f64.
        let on_host = var.as_detached_tensor().to_device(&Device::Cpu);
        let floats = on_host.and_then(|buffer| buffer.to_dtype(DType::F64));
        let floats = floats.map_err(Error::during("hashing a buffer"))?;
        let digest = Digest::new().floats(&floats)?;
        let (dims, dtype, hash) = (var.dims(), var.dtype(), digest.value());
        lines.push(format!("buffer {name} {dims:?} {dtype:?} with values of hash {hash:016x}"));
    }
    Ok(lines)
}

/// Describes what must be equal on all ranks of a group that keep the same shard.
fn describe_kept(model: &Model, group: usize) -> Vec<String> {
    let units = model.units.iter().filter(|unit| unit.is_read);
    let units = units.filter_map(|unit| Some((&unit.name, unit.kept_digests.as_ref()?[group])));
    units
        .map(|(name, digest)| format!("unit {name} that read values of hash {:016x}", digest.value()))
        .collect()
}
