//! Construction of a pipeline: splits the model, builds this rank's stages, connects the ranks.

use std::sync::Arc;

use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use comm::Communicator;
use training::is_buffer;

use crate::average::completion_positions;
use crate::failure_reports::FailureReports;
use crate::first_audit::FirstAudit;
use crate::groups::Groups;
use crate::links::Links;
use crate::{
    Cost, Error, Modules, PipelineConfig, Result, Schedule, Split, agreement, replicas, shapes, stage, tied,
};

use super::{Pipeline, all_vars};

impl Pipeline {
    /// Splits the model, builds this rank's stages, and connects the ranks. Every rank must call it, with equal arguments.
    ///
    /// `builder` returns a builder that stores its variables in the given map. It is called for each module with a new map,
    /// and the maps of other ranks' modules are dropped, so random numbers are drawn as in a single process. `example` is a
    /// micro-batch of input, which determines shape and dtype. `loss` takes the last stage's output and the target of a
    /// micro-batch and returns the mean over its rows.
    ///
    /// # Cost
    /// Every module is built once, and once more with zeros unless the split is [`Split::At`]; each stage runs forward once; the first replica's variables are broadcast. Groups of two
    /// ranks: one for each direction between stages, and two for each pair of neighbours, of ranks with tied variables, and
    /// of replicas. One group of all replicas, and one of all ranks with the same tied variables.
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
    /// use pipeline::{Modules, Pipeline, PipelineConfig, ScheduleKind};
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
        let (table, device) = (schedule.table(), example.device().clone());
        if table.ranks() != comm.world_size() {
            let (what, got) = ("the ranks of a schedule".to_string(), table.ranks().to_string());
            return Err(Error::InvalidArgument {
                what,
                got,
                help: format!("the group has {}", comm.world_size()),
            });
        }
        let groups = Groups::new(comm.clone(), config);
        agreement::check(&groups, table, modules, config, example)?;
        let costs = costs(&groups, modules, &config.split, example)?;
        let ranges = config.split.stages(&modules.names(), &costs, table.stages())?;
        let own: Vec<bool> = table.owners.iter().map(|owner| *owner == comm.rank()).collect();
        let stages = groups.all_agree(stage::build(modules, &ranges, &own, builder))?;
        groups.all_agree(replicas::broadcast_variables(groups.dp.as_deref(), &all_vars(&stages)))?;
        let mut names = vec!["running_mean".to_string(), "running_var".to_string()];
        names.extend(modules.buffers.clone());
        let specs = groups.all_agree(shapes::find(&*comm, table, &stages, example, &device, &names))?;
        let (buffers, parameters) =
            all_vars(&stages).into_iter().partition(|(name, _)| is_buffer(&names, name));
        let (ties, tied) = groups.all_agree(tied::tie(&*comm, &config.tied, &all_vars(&stages)))?;
        let failures = Arc::new(FailureReports::new(comm.clone(), table, &tied, groups.dp.as_deref())?);
        let copies = replicas::group(&groups)?;
        let links = Links::new(&*comm, failures.clone(), table, specs.clone(), &device)?;
        let last_places = completion_positions(&table.actions[comm.rank()]);
        Ok(Self {
            copies,
            stages,
            specs,
            ties,
            links: Some(links),
            evaluation: None,
            failures,
            loss: Box::new(loss),
            before_forward: None,
            row_keys: Vec::new(),
            measures: false,
            device,
            last_places,
            bucket_bytes: config.bucket_bytes,
            rows: example.dims().first().copied().unwrap_or(1),
            divided: None,
            first_audit: FirstAudit::new(&groups, &config.audit)?,
            parameters,
            buffers,
            failed: None,
            groups,
            schedule,
        })
    }
}

/// Returns the cost of each module, the same on every rank; empty if the split does not need costs.
fn costs(groups: &Groups, modules: &Modules, split: &Split, example: &Tensor) -> Result<Vec<f64>> {
    let (device, during) = (example.device(), || Error::during("measuring modules"));
    let dtype = if example.dtype().is_float() { example.dtype() } else { DType::F32 };
    match split {
        Split::At(_) => Ok(Vec::new()),
        Split::Balanced(Cost::Parameters) => {
            let counts = modules.parameters(dtype, device).map_err(during())?;
            Ok(counts.into_iter().map(|count| count as f64).collect())
        }
        Split::Balanced(Cost::ForwardTime) => {
            // The ranks that share layers with the first rank take part in the measurement.
            let measured = match groups.pp.rank() == 0 {
                true => modules.forward_seconds(example, dtype, device, 5).map_err(during()),
                false => Ok(Vec::new()),
            };
            groups.broadcast_from_first(groups.all_agree(measured)?)
        }
    }
}
