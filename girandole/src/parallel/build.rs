//! Builds a model in its layout.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result as CandleResult, Shape, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use comm::{Communicator, all_gather_object};
use ddp::Ddp;
use fsdp::{Fsdp, UnitBuilder};
use pipeline::Modules;
use strategy::DistributedModel;
use tensor_parallel::{Shards, TensorParallelConfig, Weights};
use training::build::{Builder, Model, RangeReader, Recompute, UnitPlace, UnitSource};
use training::{LossScaler, OnMissingGradient};

use super::axes::{Axes, length_of};
use super::far_groups::FarGroups;
use super::pieces::tie_roots;
use super::stages::{PassedOn, Stages, WithoutLastUnit};
use super::trained::trained;
use super::{Kind, Parallel, ParallelConfig, Remake};
use crate::{Error, Layout, Result};

/// Creates a model from its parameters.
type Build<M> = Arc<dyn Fn(&Builder) -> CandleResult<M> + Send + Sync>;

impl<M: Model + Send + Sync + 'static> Parallel<M> {
    /// Distributes a model over the ranks of `comm`. Call on every rank, with equal arguments.
    ///
    /// `weights` are the initial values of the parameters. [`InitialWeights::seed`](crate::InitialWeights) draws the
    /// same values as PyTorch. `models::Weights::parts` reads them from a model folder; each rank reads only its
    /// part of divided layers and its shard; with `pp` it reads the units of all stages, one at a time, and keeps its
    /// own. `build` creates the model; with `pp` it is called several times, for one unit each.
    ///
    /// # Cost
    /// With `far` one group for the ranks of each of its groups, and one across them. One group for each axis, one for the ranks of `dp`, `shard` and `ep` together, with `cp` one for those that average gradients,
    /// and with `ep` one for those that average experts', and with `shard`, too, one for those
    /// that have the same shards; the cost of the strategy.
    ///
    /// # Errors
    /// A layout for another number of ranks; errors of `build` and of the strategy; failures of communication.
    pub fn new(
        comm: Arc<dyn Communicator>,
        layout: &Layout,
        weights: impl Into<Weights>,
        config: &ParallelConfig,
        build: impl Fn(&Builder) -> CandleResult<M> + Send + Sync + 'static,
    ) -> Result<Self> {
        let weights = weights.into();
        let again = weights_of_untrained(&weights, config);
        let far = FarGroups::new(comm.clone(), layout, config.far_groups)?;
        let group = far.as_ref().map_or(comm, |far| far.group.clone());
        let own = Self::build(group, &layout.of_group(), &weights, config, Arc::new(build), again)?;
        Ok(Self { layout: *layout, far, ..own })
    }

    /// Like [`new`](Self::new), on a rank that joins a running job: a [`Trainer::joining`](crate::trainer::Trainer::joining)
    /// then receives the state from the other ranks. Trained parameters have any values until then. Call with
    /// [`Joining::layout`](crate::trainer::Joining::layout).
    ///
    /// # Cost
    /// That of [`new`](Self::new), without reading or drawing the parameters that are trained.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn joining(
        comm: Arc<dyn Communicator>,
        layout: &Layout,
        weights: impl Into<Weights>,
        config: &ParallelConfig,
        build: impl Fn(&Builder) -> CandleResult<M> + Send + Sync + 'static,
    ) -> Result<Self> {
        // The other ranks build the model again with the same weights.
        Self::new(comm, layout, weights_of_untrained(&weights.into(), config), config, build)
    }

    /// Builds the model; `again` are the weights with which it is built another time.
    fn build(
        comm: Arc<dyn Communicator>,
        layout: &Layout,
        weights: &Weights,
        config: &ParallelConfig,
        build: Build<M>,
        again: Weights,
    ) -> Result<Self> {
        let source = build.clone();
        let remake: Remake<M> = Arc::new(move |comm, layout, config| {
            Self::build(comm, layout, &undrawn(&again), config, source.clone(), again.clone())
        });
        check_config::<M>(config, layout)?;
        let scaler = config.loss_scale.map(LossScaler::new).transpose()?;
        let axes = Axes::new(layout, comm, config.sequence_parallel, config.balance.is_some())?;
        let mesh = &axes.of_parameters;
        let tensors = TensorParallelConfig {
            sequence_parallel: config.sequence_parallel,
            dtype: config.dtype,
            device: config.device.clone(),
            ..Default::default()
        };
        let outline = build(&Builder::of_units(Arc::new(NoUnits)))?;
        if outline.units().is_empty() {
            let help = "make its parts with Builder::unit, and give them in Units::units, in the order of the forward pass";
            return Err(Error::invalid("the model", "no units", help));
        }
        let ties = outline.ties();
        let roots = tie_roots(&ties);
        let mut shards = Shards::new(mesh, &tensors, weights)?;
        if layout.pp > 1 {
            // Only stages create tied parameters twice.
            shards = shards.with_copies(roots.clone());
        }
        let mut config = config.of_strategies();
        if let Some(is_trained) = config.is_trained.take() {
            // A tied parameter is trained if the parameter that it is tied to is trained.
            config.is_trained =
                Some(Arc::new(move |name| is_trained(roots.get(name).map_or(name, String::as_str))));
        }
        if let (Some(rows), Some(example)) = (&axes.context, &config.example) {
            config.example = Some(rows.divide(length_of(example)?, None)?.part_of(example)?);
        }
        let of_parameters = layout.of_parameters();
        let model = make(&of_parameters, &axes, &shards, &config, &ties, move |builder| build(builder))?;
        check_experts(&axes)?;
        let mut parallel = Self {
            layout: *layout,
            far: None,
            axes,
            shards,
            model,
            config,
            ties,
            scaler,
            counted: Default::default(),
            steps: 0,
            routing: Default::default(),
            knows_documents: false,
            failed: None,
            remake,
        };
        let counted = parallel.pieces()?.into_iter().filter(|piece| piece.is_first && !piece.is_buffer);
        parallel.counted = counted.map(|piece| piece.var.id()).collect();
        Ok(parallel)
    }
}

/// Refuses a configuration that no layout can have with this model.
fn check_config<M: Model>(config: &ParallelConfig, layout: &Layout) -> Result<()> {
    if config.micro_batches == 0 {
        return Err(Error::invalid("micro_batches", 0, "give 1 or more"));
    }
    if config.recompute == Recompute::Every(0) {
        return Err(Error::invalid("recompute", "Every(0)", "give 1 or more, or Recompute::None"));
    }
    if config.sequence_parallel && !M::divides_sequences() {
        let help = "leave it out: this model may compute positions of a sequence together (Model::divides_sequences)";
        return Err(Error::invalid("ParallelConfig::sequence_parallel", true, help));
    }
    if layout.cp > 1 && !config.device.is_cpu() {
        let help = "leave out cp: divided rows are computed on a CPU only, so far";
        return Err(Error::invalid("the layout", layout, help));
    }
    if layout.cp > 1 && !M::divides_sequences() {
        let help = "leave out cp: this model may compute positions of a sequence together (Model::divides_sequences)";
        return Err(Error::invalid("the layout", layout, help));
    }
    if config.fsdp.mixed_precision.output_dtype.is_some() {
        let help = "leave it out: a model in a layout gives what its last unit gives";
        return Err(Error::invalid("ParallelConfig::fsdp's output_dtype", "a dtype", help));
    }
    Ok(())
}

/// Refuses `ep` for a model in which no rank has experts. Must be called on every rank.
fn check_experts(axes: &Axes) -> Result<()> {
    let Some(experts) = &axes.experts else { return Ok(()) };
    let found = all_gather_object(&**axes.mesh.world(), &experts.has_experts())?;
    if found.contains(&true) {
        return Ok(());
    }
    let help = "leave it out: this model has no experts (training::build::Part::weight_of_expert)";
    Err(Error::invalid("the axis ep of the layout", experts.comm().world_size(), help))
}

/// Returns the weights with which a model is built again: parameters that are trained are given their values later.
fn weights_of_untrained(weights: &Weights, config: &ParallelConfig) -> Weights {
    match &config.is_trained {
        None => Weights::from(Arc::new(Zeros) as Arc<dyn RangeReader>),
        Some(_) => undrawn(weights),
    }
}

/// Returns the same weights; those that are drawn are not drawn from this generator, so that they can be drawn again.
fn undrawn(weights: &Weights) -> Weights {
    match weights {
        Weights::Random(generator) => Weights::Random(generator.with(|generator| generator.clone()).into()),
        other => other.clone(),
    }
}

fn make<M: Model + Send + Sync + 'static>(
    layout: &Layout,
    axes: &Axes,
    shards: &Shards,
    config: &ParallelConfig,
    ties: &[(String, String)],
    build: impl Fn(&Builder) -> CandleResult<M> + Send + Sync + 'static,
) -> Result<Kind<M>> {
    let (Axes { of_parameters: mesh, averaged_over, .. }, recompute) = (axes, config.recompute);
    let layers = match &axes.experts {
        None => shards.layers(),
        Some(experts) => experts.layers(shards.layers()),
    };
    let build = move |builder: Builder| build(&builder.with_layers(layers.clone()).recomputing(recompute));
    if layout.pp > 1 {
        let passed_on = PassedOn::default();
        let to = passed_on.clone();
        let build = move |builder: &Builder| Ok(WithoutLastUnit::new(build(builder.clone())?, to.clone()));
        let buffers: Vec<&str> = config.buffers().collect();
        let modules = Modules::of_units(build)?.buffers(&buffers);
        // Tied parameters start with equal values; those that are not trained keep them, and need no synchronization.
        let ties: Vec<_> = ties.iter().filter(|(first, _)| config.is_trained(first)).cloned().collect();
        let stages = Stages::new(mesh, averaged_over, shards, config, &ties, &modules, passed_on)?;
        return Ok(Kind::Stages(Box::new(stages)));
    }
    if layout.shard > 1 {
        let vb = shards.tensor_builder();
        let build = |units: UnitBuilder<'static>| {
            // If the weights can be read in parts, each rank reads only what it keeps.
            let units = shards.parts().map_or(units.clone(), |parts| units.reading(parts));
            let units = TrainedUnits { units, config: config.clone() };
            build(Builder::of_units(Arc::new(units)))
        };
        let mut fsdp = config.fsdp.clone();
        if layout.tp > 1 {
            // Ranks of `tp` may have different numbers of rows of a vocabulary. Small parameters in one part with such a
            // table would be cut at other places on each, but their gradients are summed over these ranks.
            fsdp.pack_elements = 0;
        }
        if config.is_trained.is_some() {
            // Parameters that are not trained lack a gradient on purpose.
            fsdp.audit.on_missing = OnMissingGradient::Ignore;
        }
        let (averaged_over, same_shard) = (averaged_over.clone(), axes.same_shard.clone());
        return Ok(Kind::Sharded(Fsdp::with_groups(
            mesh.axis("shard")?.clone(),
            averaged_over,
            same_shard,
            vb,
            &fsdp,
            build,
        )?));
    }
    let whole = shards.tensor_builder();
    let in_builder = |vb| build(Builder::new(trained(vb, whole.clone(), config)));
    if layout.dp > 1 || layout.ep > 1 {
        return Ok(Kind::Copies(Ddp::with_groups(
            averaged_over.clone(),
            whole.clone(),
            &config.ddp,
            in_builder,
        )?));
    }
    let vars = VarMap::new();
    Ok(Kind::Whole { model: in_builder(shards.var_builder(&vars))?, vars, unaudited: true })
}

/// Unit source for FSDP. Parameters that are not trained are sharded as well.
struct TrainedUnits {
    units: UnitBuilder<'static>,
    config: ParallelConfig,
}

impl UnitSource for TrainedUnits {
    fn unit(
        &self,
        name: &str,
        build: &mut dyn FnMut(VarBuilder<'static>) -> CandleResult<()>,
    ) -> CandleResult<UnitPlace> {
        UnitSource::unit(&self.units, name, &mut |vb| build(trained(vb.clone(), vb, &self.config)))
    }
}

/// A unit source with no unit on this rank: used to get the ties of a model without building it.
struct NoUnits;

impl UnitSource for NoUnits {
    fn unit(
        &self,
        _: &str,
        _: &mut dyn FnMut(VarBuilder<'static>) -> CandleResult<()>,
    ) -> CandleResult<UnitPlace> {
        Ok(UnitPlace::OtherProcess)
    }
}

/// Weights of a model that is given its values later.
#[derive(Debug)]
struct Zeros;

impl RangeReader for Zeros {
    fn read(
        &self,
        _: &str,
        _: &Shape,
        _: Init,
        dtype: DType,
        ranges: &[Range<usize>],
    ) -> CandleResult<Tensor> {
        Tensor::zeros(ranges.iter().map(Range::len).sum::<usize>(), dtype, &Device::Cpu)
    }
}
