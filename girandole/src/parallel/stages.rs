//! A model in pipeline stages, optionally with copies, divided layers, and sharded optimizers.

use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{Module, Tensor, Var, bail};
use candle_nn::VarMap;
use comm::{Communicator, Mesh, Stats};
use ops::RowContext;
use pipeline::{Modules, Pipeline, PipelineConfig};
use strategy::{DistributedModel, ParameterGroups};
use tensor_parallel::Shards;
use training::build::{Model, Units, whole_rows};

use super::flat_shards::FlatShards;
use super::micro_batches::{added, count_of, number, weighted, zero_loss};
use super::trained::trained;
use super::{Kind, Parallel, ParallelConfig};
use crate::{Batch, Result};
use training::internal::lock;

/// Computes the output of the last unit from its input.
type LastUnit = Box<dyn Fn(&Tensor) -> candle_core::Result<Tensor> + Send>;

/// The stages of this rank.
pub(crate) struct Stages {
    pipeline: Pipeline,
    last_unit: LastUnit,
    /// With `shard`: the shards of the optimizer.
    flat: Option<FlatShards>,
    sums: Arc<Mutex<Sums>>,
    micro_batches: usize,
}

/// Weight and sum of the losses of the last stage.
#[derive(Default)]
struct Sums {
    /// Factor of a sum of losses that makes the mean over micro-batches and ranks the mean over all targets.
    loss_factor: f64,
    sum: f64,
    /// Rows of the batch that are still to be counted; micro-batches come in order.
    rows: usize,
    /// In an evaluation: what the model adds up beside the losses.
    evaluated: Option<Vec<f64>>,
}

impl Sums {
    /// Returns the rows of the next micro-batch that count, as the input of the last unit and targets.
    fn counted(&mut self, x: &Tensor, targets: &Tensor) -> candle_core::Result<(Tensor, Tensor)> {
        let of = targets.dim(0)?;
        let rows = self.rows.min(of);
        self.rows -= rows;
        match rows == of {
            true => Ok((x.clone(), targets.clone())),
            false => Ok((x.narrow(0, 0, rows)?.contiguous()?, targets.narrow(0, 0, rows)?.contiguous()?)),
        }
    }
}

impl Stages {
    pub(super) fn new<M: Model + Send + Sync + 'static>(
        mesh: &Mesh,
        averaged_over: &ParameterGroups,
        shards: &Shards,
        config: &ParallelConfig,
        ties: &[(String, String)],
        modules: &Modules,
        passed_on: PassedOn<M>,
    ) -> Result<Self> {
        let several = |comm: &Arc<dyn Communicator>| (comm.world_size() > 1).then(|| comm.clone());
        let (pp, shard) = (mesh.axis("pp")?.clone(), mesh.axis("shard")?);
        let pipeline_config = PipelineConfig {
            schedule: config.schedule,
            micro_batches: config.micro_batches,
            split: config.split.clone(),
            averaged_over: (averaged_over.all().world_size() > 1).then(|| averaged_over.clone()),
            bucket_bytes: config.ddp.bucket_bytes,
            tp: several(mesh.axis("tp")?),
            tied: ties.to_vec(),
            audit: config.audit.clone(),
            ..PipelineConfig::default()
        };
        let sums: Arc<Mutex<Sums>> = Arc::default();
        let (own, last) = (sums.clone(), passed_on.clone());
        let loss = move |x: &Tensor, targets: &Tensor| {
            let mut own = lock(&own);
            let (model, (counted, targets)) = (last.model()?, own.counted(x, targets)?);
            let (count, weight) = count_of::<M>(&RowContext::current(), &targets)?;
            if count == 0 {
                return Ok(zero_loss(&model.last_unit(x)?)?);
            }
            let rows = RowContext::current().part(0..targets.dim(0)?);
            let loss = rows.scope(|| match &mut own.evaluated {
                None => model.last_unit_loss(&counted, &targets),
                Some(sums) => {
                    let (loss, of_part) = model.evaluate_last_unit(&counted, &targets)?;
                    *sums = added(std::mem::take(sums), of_part);
                    Ok(loss)
                }
            })?;
            own.sum += number(&loss)? * count as f64 * weight;
            Ok(weighted(&loss, count, own.loss_factor * weight)?)
        };
        let builder = |map: &VarMap| trained(shards.var_builder(map), shards.tensor_builder(), config);
        let mut pipeline = match &config.example {
            Some(example) => Pipeline::new(pp, modules, &builder, example, loss, &pipeline_config)?,
            // The first batch is the example.
            None => Pipeline::unprepared(pp, modules, &builder, loss, &pipeline_config)?,
        };
        pipeline.set_divided(|name| shards.divided(name));
        let flat = match several(shard) {
            Some(shard) => Some(FlatShards::new(shard, pipeline.named_vars())?),
            None => None,
        };
        let last_unit: LastUnit = Box::new(move |x| passed_on.model()?.last_unit(x));
        let micro_batches = config.micro_batches;
        Ok(Self { pipeline, last_unit, flat, sums, micro_batches })
    }

    /// Takes a micro-batch's input as the example, where none was given. Every rank must call it.
    pub(super) fn prepare(&mut self, input: &Tensor) -> Result<()> {
        if self.pipeline.is_prepared() { Ok(()) } else { Ok(self.pipeline.prepare(input)?) }
    }

    pub(super) fn named_vars(&self) -> Vec<(String, Var)> {
        match &self.flat {
            Some(flat) => flat.named_vars(),
            None => self.pipeline.named_vars(),
        }
    }

    pub(super) fn buffers(&self) -> &[(String, Var)] {
        self.pipeline.buffers()
    }

    pub(super) fn flat(&self) -> Option<&FlatShards> {
        self.flat.as_ref()
    }

    /// Traffic in groups that only stages have.
    pub(super) fn stats(&self) -> Stats {
        self.pipeline.stats()
    }

    /// The ranks that hold the shards of a stage's parameters, if there are several.
    pub(super) fn shard_group(&self) -> Option<&Arc<dyn Communicator>> {
        self.flat.as_ref().map(FlatShards::comm)
    }

    /// Returns the sum of the losses of all targets, if this rank has the last stage (otherwise 0), and the gradients.
    pub(crate) fn step(
        &mut self,
        batch: &Batch,
        rows: Vec<RowContext>,
        loss_factor: f64,
        shards: &Shards,
    ) -> Result<(f64, GradStore)> {
        // The pipeline takes the mean over micro-batches (`loss_gradient` in `pipeline/src/executor.rs`), here they are summed.
        let loss_factor = loss_factor * self.micro_batches as f64;
        self.begin(Sums { loss_factor, rows: usize::MAX, ..Sums::default() })?;
        self.pipeline.set_row_contexts(rows);
        let mut step = self.pipeline.step(Some(&batch.input), Some(&batch.targets))?;
        shards.sum_gradients(&self.pipeline.named_vars(), &mut step.grads)?;
        let grads = match &self.flat {
            Some(flat) => flat.of_gradients(&step.grads)?,
            None => step.grads,
        };
        Ok((self.sums().sum, grads))
    }

    /// Returns the sum of the losses as [`step`](Self::step), of the first `counted` rows, and what the model adds up beside it.
    pub(super) fn evaluate(
        &mut self,
        batch: &Batch,
        rows: Vec<RowContext>,
        counted: usize,
    ) -> Result<(f64, Vec<f64>)> {
        self.begin(Sums { loss_factor: 1.0, rows: counted, evaluated: Some(Vec::new()), ..Sums::default() })?;
        self.pipeline.set_row_contexts(rows);
        self.pipeline.evaluate(Some(&batch.input), Some(&batch.targets))?;
        let mut own = self.sums();
        Ok((own.sum, own.evaluated.take().unwrap_or_default()))
    }

    /// Gathers the parameters that an optimizer may have changed. Call before [`forward`](Self::forward).
    pub(super) fn gather(&self) -> Result<()> {
        self.flat.as_ref().map_or(Ok(()), FlatShards::gather)
    }

    pub(super) fn forward(
        &mut self,
        input: &Tensor,
        last: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let last = |x: &Tensor| last(&(self.last_unit)(x)?);
        Ok(whole_rows(|| self.pipeline.forward(input, last))?)
    }

    fn begin(&mut self, sums: Sums) -> Result<()> {
        *self.sums() = sums;
        self.gather()
    }

    fn sums(&self) -> std::sync::MutexGuard<'_, Sums> {
        lock(&self.sums)
    }
}

/// A model in stages. In place of its last unit it has one that passes its input on to the loss, and the model with it.
pub(super) struct WithoutLastUnit<M> {
    model: Arc<M>,
    last: PassOn<M>,
}

/// What the last stage passes on to the loss: the model that has the last unit.
pub(super) struct PassedOn<M>(Arc<Mutex<Option<Arc<M>>>>);

struct PassOn<M> {
    model: Arc<M>,
    to: PassedOn<M>,
}

impl<M> WithoutLastUnit<M> {
    pub(super) fn new(model: M, to: PassedOn<M>) -> Self {
        let model = Arc::new(model);
        Self { last: PassOn { model: model.clone(), to }, model }
    }
}

impl<M: Model> Units for WithoutLastUnit<M> {
    fn units(&self) -> Vec<&dyn Module> {
        let mut units = self.model.units();
        if let Some(last) = units.last_mut() {
            *last = &self.last;
        }
        units
    }
}

impl<M> Module for PassOn<M> {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        *lock(&self.to.0) = Some(self.model.clone());
        Ok(x.clone())
    }
}

impl<M> PassedOn<M> {
    /// Returns the model whose last unit was to run last.
    ///
    /// # Errors
    /// No last unit was to run: the last stage is another rank's.
    pub(super) fn model(&self) -> candle_core::Result<Arc<M>> {
        match &*lock(&self.0) {
            Some(model) => Ok(model.clone()),
            None => bail!("the last unit is not in this process: it belongs to another stage"),
        }
    }
}

impl<M> Default for PassedOn<M> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<M> Clone for PassedOn<M> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

/// The stages of a pipeline with their current parameters, until the next step: see [`Parallel::stages`].
pub struct StagesForward<'a>(&'a mut Stages);

impl<M: Model> Parallel<M> {
    /// Returns the stages of a pipeline, for forward passes on all ranks together, in place of
    /// [`model`](Parallel::model); `None` without `pp`. Call on every rank.
    ///
    /// # Cost
    /// With `shard`, the parameters that an optimizer has changed are gathered.
    ///
    /// # Errors
    /// The cause, if an earlier call failed; failures of communication.
    pub fn stages(&mut self) -> Result<Option<StagesForward<'_>>> {
        self.check()?;
        match &mut self.model {
            Kind::Stages(stages) => {
                stages.gather()?;
                Ok(Some(StagesForward(stages)))
            }
            _ => Ok(None),
        }
    }
}

impl StagesForward<'_> {
    /// Computes the model's output for an input, without backward. Returns the same on every rank. Call on every rank
    /// with the same input. `last` is applied to the output on the last stage before it is sent to all ranks: it may
    /// select the part that is needed. For packed rows call it in a scope of their [`Documents`](ops::Documents).
    ///
    /// # Cost
    /// Stages compute one after the other; the output of each is broadcast along `pp`.
    ///
    /// # Errors
    /// Errors of a stage, on every rank; failures of communication. No step is possible afterwards.
    pub fn forward(
        &mut self,
        input: &Tensor,
        last: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        self.0.forward(input, last)
    }
}

impl std::fmt::Debug for StagesForward<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StagesForward")
    }
}
