//! `pipeline-transformer`, the pipeline tutorial: a Transformer cut into stages, trained with micro-batches.

mod batches;
mod compare;
mod modules;
mod options;
mod utilization;

use ops::cross_entropy;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use cli::prelude::*;
use cli::start::check_world_size;
use cli::trainer::Staged;
use comm::{Communicator, Mesh, Operation, all_gather_object};
use pipeline::{ParameterGroups, Pipeline, PipelineConfig, Plan};
use report::Timeline;
use sampler::{Generator, SharedGenerator};
use serde::{Deserialize, Serialize};
use training::{FileError, Sgd, SgdConfig, TorchInit};

pub use modules::transformer_modules;
pub use options::PipelineTransformerOptions;

use batches::Batches;
use strategy::DistributedModel;
use utilization::Utilization;

use crate::documents::shared::python::{Float, IntTensor};
use crate::documents::shared::transformer::Transformer;
use crate::documents::shared::transformer::module_tree;
use crate::documents::shared::transformer::rows::{self, Batch, Row};
use training::internal::lock;

/// Number of steps of which the fastest is shown in a report.
const TRIES: usize = 5;

/// What each process creates at the start.
pub struct Setup {
    rows: Vec<Row>,
    /// The weights of `--init`, of the whole model.
    given: Option<VarMap>,
    device: Device,
}

/// Result of training.
#[derive(Debug, Serialize, Deserialize)]
pub struct Trained {
    series: RunSeries,
    uses: Vec<Utilization>,
    /// Timeline of one step on the ranks of the first model copy.
    measured: Plan,
}

/// A rank's pipeline, and the step number that seeds its dropout.
struct BuiltPipeline {
    pipeline: Pipeline,
    step: Arc<AtomicUsize>,
}

impl Command for PipelineTransformerOptions {
    const NAME: &'static str = "pipeline-transformer";
    const WORLD_SIZE: usize = 2;
    const JOINT: &'static [&'static str] = &["save", "report"];
    type Setup = Setup;
    type Trained = Trained;

    options_of!(common, checkpoints);

    fn settings(&self, _: usize) -> Vec<(String, String)> {
        // Without the stages and their ranks, which do not affect the results.
        let own = settings!(self, lr, batch_size, micro_batches, schedule, dp);
        [own, self.sizes.settings()].concat()
    }

    fn reporter(&self, world_size: usize) -> usize {
        // The rank of the last stage, in the first copy of the model.
        let schedule = self.pipeline_schedule(world_size).ok();
        schedule.and_then(|schedule| schedule.table().owners.last().copied()).unwrap_or(0) * self.dp
    }

    fn check(&self, world_size: usize) -> Result<()> {
        // First, since sizes that do not fit in memory must be rejected before the modules are built.
        self.check_sizes(world_size)?;
        let modules = transformer_modules(&self.sizes.config(), &SharedGenerator::from(Generator::new(0)));
        self.check_stages(world_size, &modules.names())
    }

    fn setup(&self) -> Result<Setup> {
        let rows = self.sizes.rows(self.common.data.as_deref())?;
        if let (Err(help), Some(path)) = (self.check_rows(rows.len()), &self.common.data) {
            let reason = format!("it has {} rows; {help}", rows.len());
            return Err(FileError::tensor(path, "tokens", reason).into());
        }
        let device = self.common.device()?;
        let given = match self.common.init {
            None => None,
            Some(_) => {
                let variables = Variables::new(&self.common)?;
                let random = variables.generator.clone();
                variables
                    .make(&self.common, |builder| Transformer::new(builder, &self.sizes.config(), &random))?;
                Some(variables.map)
            }
        };
        Ok(Setup { rows, given, device })
    }

    fn prepare(&self, setup: &Setup, _: usize, _: Option<&mut MetricsWriter>) -> Result<()> {
        note(format_args!(
            "as the pipeline tutorial does, this run shows each token all others, so that the answer is in sight"
        ));
        say(format_args!("{}", module_tree::tutorial_transformer(&self.sizes.config())))?;
        setup.rows.iter().try_for_each(|row| say(format_args!("{}", IntTensor(row))))
    }

    fn train(&self, setup: Setup, rank: &mut Rank) -> Result<Trained> {
        let world = rank.comm.clone();
        let world_size = world.world_size();
        let (stages, copies) = self.groups(&world)?;
        let copy = copies.as_ref().map_or(0, |copies| copies.rank());
        let config =
            PipelineConfig { averaged_over: copies.map(ParameterGroups::of), ..self.config(world_size) };
        let batches = self.batches(&setup, copy)?;
        let made = |config: &PipelineConfig| self.make(&stages, &setup, config, copy);
        let first = batches.first().cloned();
        let name = format!("{}, {} micro-batches", self.schedule, self.micro_batches);
        let reporter = self.reporter(world_size);
        let BuiltPipeline { pipeline, step } = made(&config)?;
        let sgd = SgdConfig { learning_rate: self.lr, ..SgdConfig::default() };
        let optimizer = Sgd::named(pipeline.named_vars(), sgd)?;
        let staged = Staged::new(pipeline, step, optimizer, name, (world.clone(), reporter));
        let mut trainer = Trainer::new(staged, Batches(batches));
        let mut losses = Losses(|step: &Step<'_>, loss: f32| {
            let loss = Float(loss.into());
            step.say(format_args!("Epoch {}, Batch {}, Loss: {loss}", step.epoch, step.batch))
        });
        let series = trainer.run(rank, &self.run_config(rank), &mut losses)?.series;
        let mut pipeline = trainer.into_model().into_pipeline();
        let measured = match (&self.common.report, &first) {
            (Some(_), Some(batch)) => quickest(&*stages, &mut pipeline, batch)?,
            _ => Plan::default(),
        };
        if let Some(path) = &self.common.save {
            pipeline.save_full(path)?;
        }
        let uses = match (self.compare, &first) {
            (true, Some(batch)) => compare::measure(&*world, &*stages, &config, batch, &made)?,
            _ => Vec::new(),
        };
        let series = all_gather_object(&*world, &series)?.swap_remove(reporter);
        Ok(Trained { series, uses, measured })
    }

    fn conclude(&self, outcome: &Outcome<Trained>) -> Result<()> {
        match outcome.trained.uses.is_empty() {
            true => Ok(()),
            false => compare::print(&outcome.trained.uses),
        }
    }

    fn report(&self, outcome: Outcome<Trained>) -> Report {
        let ranks = self.ranks(outcome.ranks.len());
        let plan =
            self.pipeline_schedule(outcome.ranks.len()).map(|schedule| schedule.plan(&Default::default()));
        let plan = plan.unwrap_or_default();
        let bubble = 100.0 * plan.bubble_fraction();
        let timeline = |title: &str, plan, measured| Timeline { title: title.into(), plan, measured };
        Report {
            facts: vec![
                fact("stages", ranks * self.stages_per_rank()),
                fact("copies", self.dp),
                fact("schedule", self.schedule),
                fact("micro-batches", self.micro_batches),
                fact("planned bubble", format!("{bubble:.1} %")),
                fact("epochs", self.epochs),
                fact("batch size, each copy", self.batch_size),
                fact("learning rate", self.lr),
                fact("dropout", self.sizes.dropout),
                fact("layers", self.sizes.num_layers),
            ],
            runs: vec![outcome.trained.series],
            timelines: vec![
                timeline("Planned, with equal times", plan, false),
                timeline("Measured in one step", outcome.trained.measured, true),
            ],
            ..Report::default()
        }
    }
}

impl Experiment for PipelineTransformerOptions {
    options_of!(epochs);
}

/// Returns the timeline of the fastest of a few steps. Parameters are not updated.
fn quickest(stages: &dyn Communicator, pipeline: &mut Pipeline, (input, target): &Batch) -> Result<Plan> {
    let mut plans = Vec::with_capacity(TRIES);
    for _ in 0..TRIES {
        // So that all ranks start their clocks together.
        stages.run(Operation::Barrier)?;
        let step = pipeline.step(Some(input), Some(target))?;
        plans.push(pipeline.measured(&step.spans)?);
    }
    Ok(plans.into_iter().min_by(|a, b| a.makespan().total_cmp(&b.makespan())).unwrap_or_default())
}

impl PipelineTransformerOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// Those of [`cli::run`].
    pub fn run(&self) -> Result<()> {
        if !self.show_schedule {
            return cli::run(self);
        }
        let world_size = self.common.ranks.world_size.unwrap_or(Self::WORLD_SIZE);
        check_world_size(world_size)?;
        self.check(world_size)?;
        let grid = self.pipeline_schedule(world_size)?.to_string();
        grid.lines().try_for_each(|line| say(format_args!("{line}")))
    }

    /// Returns the group of ranks that hold one copy of the model, and the group of those with the same stages in all
    /// copies.
    #[expect(clippy::type_complexity, reason = "two groups")]
    fn groups(
        &self,
        world: &Arc<dyn Communicator>,
    ) -> Result<(Arc<dyn Communicator>, Option<Arc<dyn Communicator>>)> {
        if self.dp == 1 {
            return Ok((world.clone(), None));
        }
        let mesh = Mesh::new(world.clone(), &[("pp", self.ranks(world.world_size())), ("dp", self.dp)])?;
        Ok((mesh.axis("pp")?.clone(), Some(mesh.axis("dp")?.clone())))
    }

    /// Returns this copy's batches of an epoch.
    fn batches(&self, setup: &Setup, copy: usize) -> Result<Vec<Batch>> {
        let size = self.batch_size;
        let own = setup.rows.chunks(size * self.dp).map(|rows| &rows[copy * size..(copy + 1) * size]);
        Ok(own.map(|rows| rows::batch(rows, &setup.device)).collect::<candle_core::Result<_>>()?)
    }

    fn make(
        &self,
        stages: &Arc<dyn Communicator>,
        setup: &Setup,
        config: &PipelineConfig,
        copy: usize,
    ) -> Result<BuiltPipeline> {
        let random = SharedGenerator::from(Generator::new(self.common.seed));
        let modules = transformer_modules(&self.sizes.config(), &random);
        let length = setup.rows.first().map_or(1, |row| row.len() - 1);
        let example =
            Tensor::zeros((self.batch_size / config.micro_batches, length), DType::U32, &setup.device)?;
        let generator = SharedGenerator::from(Generator::new(self.common.seed));
        let builder = |map: &VarMap| TorchInit::var_builder(&generator, map, DType::F32, &setup.device);
        let loss = |output: &Tensor, target: &Tensor| cross_entropy(output, target, None);
        let mut pipeline = Pipeline::new(stages.clone(), &modules, &builder, &example, loss, config)?;
        if let Some(given) = &setup.given {
            let given = lock(given.data());
            for (name, var) in [&pipeline.named_vars(), pipeline.buffers()].concat() {
                given.get(&name).map_or(Ok(()), |weights| var.set(weights))?;
            }
        }
        let step = Arc::new(AtomicUsize::new(0));
        if self.sizes.dropout > 0.0 {
            let random = StepRandom { generator: random, seed: self.common.seed };
            let table = pipeline.schedule().table();
            let (now, stages, parts) = (step.clone(), table.stages(), table.micro_batches);
            // Independent of the order of execution and of which rank has the stage.
            pipeline.before_forward(move |action| {
                let step = now.load(Ordering::Relaxed);
                random.begin(copy, (step * stages + action.stage) * parts + action.micro_batch);
            });
        }
        Ok(BuiltPipeline { pipeline, step })
    }
}
