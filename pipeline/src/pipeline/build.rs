//! Construction of a pipeline: splits the model, builds this rank's stages, connects the ranks.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use comm::Communicator;
use strategy::ParameterGroups;
use training::internal::{is_buffer, known_buffers};

use crate::average::completion_positions;
use crate::failure_reports::FailureReports;
use crate::first_audit::FirstAudit;
use crate::groups::Groups;
use crate::links::Links;
use crate::{
    Cost, Error, Modules, PipelineConfig, Result, Schedule, Split, replicas, same_arguments, shapes, stage,
    tied,
};

use super::{Loss, Pipeline, all_vars};

impl Pipeline {
    /// Splits the model, builds this rank's stages, and connects the ranks. Every rank must call it, with equal arguments.
    /// [`Pipeline::unprepared`] does the first two where no example is at hand yet.
    ///
    /// `builder` returns a builder that stores its variables in the given map. It is called for each module with a new map,
    /// and the maps of other ranks' modules are dropped, so random numbers are drawn as in a single process. `example` is a
    /// micro-batch of input, which determines shape and dtype. `loss` takes the last stage's output and the target of a
    /// micro-batch and returns the mean over its rows.
    ///
    /// # Cost
    /// Every module is built once, and once more with zeros unless the split is [`Split::At`]; each stage runs forward once; the first replica's variables are broadcast. Groups of two
    /// ranks: one for each direction between stages. One group of all replicas, one of those that are not of all ranks, and one of all ranks with the same tied variables.
    ///
    /// # Errors
    /// An invalid schedule or split; variables of two modules with the same name; [`Error::Disagreement`]; [`Error::DryRun`];
    /// errors of a module; failures of communication.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{Optimizer, linear, loss};
    /// use comm::{Communicator, Local};
    /// use pipeline::{DistributedModel, Modules, Pipeline, PipelineConfig, ScheduleKind};
    /// use sampler::{Generator, SharedGenerator};
    /// use training::{Sgd, SgdConfig, TorchInit};
    ///
    /// let losses = Local::run_shared(2, |comm: Arc<dyn Communicator>| {
    ///     let modules = Modules::new()
    ///         .module("fc1", |vb| linear(4, 8, vb))
    ///         .module("tanh", |_| Ok(candle_nn::func(Tensor::tanh)))
    ///         .module("fc2", |vb| linear(8, 1, vb));
    ///     let generator = SharedGenerator::from(Generator::new(42));
    ///     let device = Device::Cpu;
    ///     let builder = |map: &_| TorchInit::var_builder(&generator, map, DType::F32, &device);
    ///     let (x, y) = (Tensor::ones((8, 4), DType::F32, &device)?, Tensor::ones((8, 1), DType::F32, &device)?);
    ///     let config = PipelineConfig { micro_batches: 4, schedule: ScheduleKind::GPipe, ..PipelineConfig::default() };
    ///     let mut pipeline = Pipeline::new(comm, &modules, &builder, &x.narrow(0, 0, 2)?, loss::mse, &config)?;
    ///     let mut optimizer = Sgd::new(pipeline.vars(), SgdConfig { learning_rate: 0.1, ..SgdConfig::default() })?;
    ///     let mut losses = Vec::new();
    ///     for _ in 0..20 {
    ///         let mut step = pipeline.step(Some(&x), Some(&y))?;
    ///         pipeline.clip_grad_norm(&mut step.grads, 10.0)?; // by the norm over all stages
    ///         optimizer.step(&step.grads)?;
    ///         losses.extend(step.loss);
    ///     }
    ///     Ok(losses)
    /// })?;
    /// assert!(losses[0].is_empty() && losses[1][19] < 0.1 * losses[1][0]); // the last rank has the loss
    /// # Ok::<(), comm::Error>(())
    /// ```
    pub fn new(
        comm: Arc<dyn Communicator>,
        modules: &Modules,
        builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
        example: &Tensor,
        loss: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> + Send + 'static,
        config: &PipelineConfig,
    ) -> Result<Self> {
        let stages_per_rank = config.stages_per_rank();
        let schedule =
            Schedule::of(config.schedule, comm.world_size(), stages_per_rank, config.micro_batches)?;
        Self::with_schedule(comm, modules, builder, example, loss, config, schedule)
    }

    /// Does the same with a custom schedule, instead of `config.schedule` and `config.micro_batches`.
    ///
    /// # Errors
    /// Those of [`Pipeline::new`]; a schedule for a different number of ranks.
    pub fn with_schedule(
        comm: Arc<dyn Communicator>,
        modules: &Modules,
        builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
        example: &Tensor,
        loss: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> + Send + 'static,
        config: &PipelineConfig,
        schedule: Schedule,
    ) -> Result<Self> {
        let mut pipeline =
            Self::build(comm, modules, builder, Some(example), Box::new(loss), config, schedule)?;
        pipeline.connect(example)?;
        Ok(pipeline)
    }

    /// Splits the model and builds this rank's stages, as [`Pipeline::new`] does, without an example of the input.
    /// [`Pipeline::prepare`] must be called with one before the first step or evaluation.
    ///
    /// # Errors
    /// Those of [`Pipeline::new`]; a split by measured time ([`Cost::ForwardTime`]), which needs an example.
    pub fn unprepared(
        comm: Arc<dyn Communicator>,
        modules: &Modules,
        builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
        loss: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> + Send + 'static,
        config: &PipelineConfig,
    ) -> Result<Self> {
        let stages_per_rank = config.stages_per_rank();
        let schedule =
            Schedule::of(config.schedule, comm.world_size(), stages_per_rank, config.micro_batches)?;
        Self::build(comm, modules, builder, None, Box::new(loss), config, schedule)
    }

    /// Connects the ranks of a pipeline that was built without an example: `example` is a micro-batch of input, which
    /// determines shape and dtype. Every rank must call it, with examples of the same shape.
    ///
    /// # Cost
    /// Each stage runs forward once.
    ///
    /// # Errors
    /// [`Error::Disagreement`]; [`Error::DryRun`]; failures of communication.
    pub fn prepare(&mut self, example: &Tensor) -> Result<()> {
        same_arguments::check_example(&self.groups, example)?;
        self.connect(example)
    }

    /// Returns true if the pipeline has an example of its input.
    pub fn is_prepared(&self) -> bool {
        self.links.is_some()
    }

    fn connect(&mut self, example: &Tensor) -> Result<()> {
        let (groups, table) = (&self.groups, self.schedule.table());
        let (comm, device) = (&*groups.pp, &self.device);
        let found = shapes::find(comm, table, &self.stages, example, device, &self.buffer_names);
        self.specs = groups.all_agree(found)?;
        self.links = Some(Links::new(comm, self.failures.clone(), table, self.specs.clone(), device)?);
        self.rows = example.dims().first().copied().unwrap_or(1);
        Ok(())
    }

    fn build(
        comm: Arc<dyn Communicator>,
        modules: &Modules,
        builder: &dyn Fn(&VarMap) -> VarBuilder<'static>,
        example: Option<&Tensor>,
        loss: Loss,
        config: &PipelineConfig,
        schedule: Schedule,
    ) -> Result<Self> {
        let table = schedule.table();
        if table.ranks() != comm.world_size() {
            let (what, got) = ("the ranks of a schedule".to_string(), table.ranks().to_string());
            return Err(Error::InvalidArgument {
                what,
                got,
                help: format!("the group has {}", comm.world_size()),
            });
        }
        let device = example.map_or_else(|| builder(&VarMap::new()).device().clone(), |x| x.device().clone());
        let groups = Groups::new(comm.clone(), config);
        same_arguments::check(&groups, table, modules, config, example)?;
        let costs = costs(&groups, modules, &config.split, example, &device)?;
        let ranges = config.split.stages(&modules.names(), &costs, table.stages())?;
        let own: Vec<bool> = table.owners.iter().map(|owner| *owner == comm.rank()).collect();
        let stages = groups.all_agree(stage::build(modules, &ranges, &own, builder))?;
        groups.all_agree(replicas::broadcast_variables(groups.averaged_over.as_ref(), &all_vars(&stages)))?;
        let mut buffer_names = known_buffers();
        buffer_names.extend(modules.buffers.clone());
        let (buffers, parameters) =
            all_vars(&stages).into_iter().partition(|(name, _)| is_buffer(&buffer_names, name));
        let ties = groups.all_agree(tied::tie(&*comm, &config.tied, &all_vars(&stages)))?;
        let failures = Arc::new(FailureReports::new(comm.clone()));
        let several = groups.averaged_over.as_ref().filter(|groups| groups.all().world_size() > 1);
        let average_groups = several.map(ParameterGroups::duplicate).transpose()?;
        let completions = completion_positions(&table.actions[comm.rank()]);
        Ok(Self {
            average_groups,
            stages,
            specs: Vec::new(),
            ties,
            links: None,
            evaluation: None,
            failures,
            loss,
            before_forward: None,
            row_contexts: Vec::new(),
            measures: false,
            device,
            completions,
            bucket_bytes: config.bucket_bytes,
            rows: 0,
            divided: None,
            tied_names: tied::roots(&config.tied),
            first_audit: FirstAudit::new(&groups, &config.audit)?,
            parameters,
            buffers,
            buffer_names,
            failed: None,
            groups,
            schedule,
        })
    }
}

/// Returns the cost of each module, the same on every rank; empty if the split does not need costs.
fn costs(
    groups: &Groups,
    modules: &Modules,
    split: &Split,
    example: Option<&Tensor>,
    device: &Device,
) -> Result<Vec<f64>> {
    let during = || Error::during("measuring modules");
    let dtype = example.map(Tensor::dtype).filter(|dtype| dtype.is_float()).unwrap_or(DType::F32);
    match split {
        Split::At(_) => Ok(Vec::new()),
        Split::Balanced(Cost::Parameters) => {
            let counts = modules.parameters(dtype, device).map_err(during())?;
            Ok(counts.into_iter().map(|count| count as f64).collect())
        }
        Split::Balanced(Cost::ForwardTime) => {
            let Some(example) = example else {
                let help =
                    "give an input of one micro-batch, with which the time is measured, or another split";
                let what = "the example of a pipeline that is split by measured time".to_string();
                return Err(Error::InvalidArgument { what, got: "none".into(), help: help.into() });
            };
            // The ranks that share layers with the first rank take part in the measurement.
            let measured = match groups.pp.rank() == 0 {
                true => modules.forward_seconds(example, dtype, device, 5).map_err(during()),
                false => Ok(Vec::new()),
            };
            groups.broadcast_from_first(groups.all_agree(measured)?)
        }
    }
}
