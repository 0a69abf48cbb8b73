//! A model in stages, at work.

mod build;
mod forward;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::thread::Builder;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use comm::{Communicator, Stats};
use training::{GradSums, RowKeys};

use crate::average::Average;
use crate::executor::{Run, State};
use crate::groups::Groups;
use crate::links::{Links, Spec};
use crate::news::News;
use crate::stage::Stage;
use crate::tied::{self, Tie};
use crate::{Action, Error, Plan, Result, Schedule, Span, Table};

type Loss = Box<dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> + Send>;

/// What a step gives a rank.
#[derive(Debug)]
pub struct Step {
    /// The mean of the micro-batches' losses, on the rank that has the last stage.
    pub loss: Option<f32>,
    /// The gradients of this rank's variables, as of the whole batch: for the optimizer.
    pub grads: GradStore,
    /// What this rank computed when, in seconds since its step began.
    pub spans: Vec<Span>,
    /// The most activations that were alive at once: pairs of stage and micro-batch.
    pub most_alive: usize,
    /// The most bytes that these held at once, where that is measured ([`Pipeline::measure_activations`]).
    pub activation_bytes: Option<usize>,
}

/// One rank's stages of a model, and its connections to the other ranks.
///
/// # Memory
/// The parameters of this rank's stages, their gradients, and as many micro-batches as the schedule keeps alive
/// ([`Schedule::live`]); two buffers for messages on each connection.
///
/// # Failure
/// When a step fails, for whatever reason, the ranks are out of step: the rank tells the others why and closes its connections, so
/// that they fail, too, with the same cause; every later call fails at once with it.
pub struct Pipeline {
    groups: Groups,
    /// For averaging; it ends with the first failure.
    copies: Option<Arc<dyn Communicator>>,
    schedule: Schedule,
    stages: Vec<Stage>,
    specs: Vec<Spec>,
    ties: Vec<Tie>,
    links: Option<Links>,
    /// For evaluation: made when it is first asked for.
    evaluation: Option<(Table, Links)>,
    news: Arc<News>,
    loss: Loss,
    before_forward: Option<Box<dyn Fn(Action) + Send>>,
    row_keys: Vec<RowKeys>,
    measures: bool,
    device: Device,
    last_places: Vec<usize>,
    bucket_bytes: usize,
    rows: usize,
    /// Of which the tensor-parallel ranks have parts, once that was said.
    divided: Option<HashSet<TensorId>>,
    failed: Option<Error>,
}

impl Pipeline {
    /// Calls `hook` before each forward pass of a stage: to seed dropout, for one, so that it does not depend on the schedule.
    pub fn before_forward(&mut self, hook: impl Fn(Action) + Send + 'static) {
        self.before_forward = Some(Box::new(hook));
    }

    /// Gives the next step's micro-batches keys, from which layers make the random numbers of their rows ([`Dropout::by_row`]): one for each,
    /// on every rank.
    ///
    /// [`Dropout::by_row`]: training::Dropout::by_row
    pub fn set_row_keys(&mut self, keys: Vec<RowKeys>) {
        self.row_keys = keys;
    }

    /// One step: forward and backward of all micro-batches. The first stage's rank needs the batch, the last one's the target.
    ///
    /// # Shapes
    /// As many micro-batches as the schedule has, one after the other along the first dimension, each as large as the example.
    ///
    /// # Errors
    /// A batch of another size; [`Error::ShapeChanged`]; what a stage fails with; [`Error::PeerFailed`] where another rank failed so.
    pub fn step(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<Step> {
        if let Some(first) = &self.failed {
            return Err(first.clone());
        }
        let step = self.try_step(input, target);
        self.close_if_failed(&step);
        step
    }

    fn close_if_failed<T>(&mut self, result: &Result<T>) {
        let Err(error) = result else { return };
        self.failed = Some(error.clone());
        self.news.tell(error);
        // The others learn from the connections that there is something to hear. All at the same time, as ranks may wait for
        // one another in any of them.
        let (links, evaluation) = (self.links.take(), self.evaluation.take());
        let (ties, copies) = (std::mem::take(&mut self.ties), self.copies.take());
        std::thread::scope(|scope| {
            // Without a thread it is dropped here, before the others.
            let _ = Builder::new().spawn_scoped(scope, move || drop(links));
            let _ = Builder::new().spawn_scoped(scope, move || drop(evaluation));
            let _ = Builder::new().spawn_scoped(scope, move || drop(ties));
            drop(copies);
        });
    }

    fn try_step(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<Step> {
        let (inputs, targets) = self.micro_batches(input, target)?;
        let table = self.schedule.table();
        let Some(links) = &mut self.links else {
            return Err(Error::BadTable { reason: "the pipeline is closed".into() });
        };
        let vars = self.stages.iter().flat_map(|stage| stage.vars.iter().map(|(_, var)| var.clone()));
        let mut run = Run {
            table,
            specs: &self.specs,
            stages: &self.stages,
            links,
            inputs,
            targets,
            loss: &*self.loss,
            before_forward: self.before_forward.as_ref().map(|hook| &**hook as &dyn Fn(Action)),
            row_keys: std::mem::take(&mut self.row_keys),
            evaluates: false,
            gradients: GradSums::new(vars),
            average: Average::new(self.copies.as_deref(), &self.news, &self.last_places, self.bucket_bytes),
            state: State::measuring(self.measures),
        };
        run.run(&table.actions[self.groups.pp.rank()])?;
        tracing::info_span!("wait").in_scope(|| run.average.wait(&mut run.gradients))?;
        let (mut gradients, state) = (run.gradients, run.state);
        tied::add(&self.ties, &mut gradients, &self.news)?;
        let State { losses, spans, most_alive, measures, most_bytes, .. } = state;
        let activation_bytes = measures.then_some(most_bytes);
        let loss = mean(&losses).map_err(Error::during("the loss"))?;
        let grads = gradients.finish().map_err(Error::during("the gradients"))?;
        Ok(Step { loss, grads, spans, most_alive, activation_bytes })
    }

    /// The mean loss of a batch, forward alone and as in evaluation (no dropout), on the rank that has the last stage. Every rank must
    /// call it, with what it gives to [`step`](Self::step).
    ///
    /// # Cost
    /// The schedule's forward passes and messages; the first call makes connections of its own.
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn evaluate(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<Option<f32>> {
        if let Some(first) = &self.failed {
            return Err(first.clone());
        }
        let loss = self.try_evaluate(input, target);
        self.close_if_failed(&loss);
        loss
    }

    fn try_evaluate(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<Option<f32>> {
        let (inputs, targets) = self.micro_batches(input, target)?;
        let (table, mut links) = match self.evaluation.take() {
            Some(made) => made,
            None => {
                let table = self.schedule.table().forward_only();
                let device = self.device.clone();
                let links =
                    Links::new(&*self.groups.pp, self.news.clone(), &table, self.specs.clone(), &device)?;
                (table, links)
            }
        };
        let mut run = Run {
            table: &table,
            specs: &self.specs,
            stages: &self.stages,
            links: &mut links,
            inputs,
            targets,
            loss: &*self.loss,
            before_forward: None,
            row_keys: Vec::new(),
            evaluates: true,
            gradients: GradSums::default(),
            average: Average::new(None, &self.news, &[], 0),
            state: State::default(),
        };
        run.run(&table.actions[self.groups.pp.rank()])?;
        let loss = mean(&run.state.losses).map_err(Error::during("the loss"));
        self.evaluation = Some((table, links));
        loss
    }

    /// A batch's micro-batches, as far as this rank needs them.
    fn micro_batches(
        &self,
        input: Option<&Tensor>,
        target: Option<&Tensor>,
    ) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let table = self.schedule.table();
        let has = |number: usize| self.stages.iter().any(|stage| stage.number == number);
        let parts = |is: bool, what, place, given: Option<&Tensor>| match given {
            _ if !is => Ok(Vec::new()),
            Some(batch) => cut(what, batch, table.micro_batches, self.rows),
            None => {
                let rank = self.groups.pp.world_ranks()[self.groups.pp.rank()];
                Err(Error::NotGiven { rank, place, what })
            }
        };
        let inputs = parts(has(0), "input", "first", input)?;
        Ok((inputs, parts(has(table.stages() - 1), "target", "last", target)?))
    }

    /// The variables of this rank's stages, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.named_vars().into_iter().map(|(_, var)| var).collect()
    }

    /// The variables with their names: by stage, then by name.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        all_vars(&self.stages)
    }

    /// Whether steps tell how many bytes of activations they held ([`Step::activation_bytes`]), which costs a walk over each graph.
    /// Not so at first.
    pub fn measure_activations(&mut self, measures: bool) {
        self.measures = measures;
    }

    /// What this rank has sent and received between stages, and along with copies of the model. Waits for what was sent in the
    /// last step to be received.
    pub fn stats(&self) -> Stats {
        let between = self.links.as_ref().map(Links::stats).unwrap_or_default();
        self.copies.as_ref().map_or(between, |copies| between + copies.stats())
    }

    /// The schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Says of which variables the ranks of [`PipelineConfig::tensor_parallel`](crate::PipelineConfig::tensor_parallel) have parts of their own, by name; of all others each
    /// has the whole, and the same. [`clip_grad_norm`](Self::clip_grad_norm) and [`check_parameters`](Self::check_parameters) need to
    /// know where there are several such ranks.
    pub fn set_divided(&mut self, is_divided: impl Fn(&str) -> bool) {
        let divided = self.named_vars().into_iter().filter(|(name, _)| is_divided(name));
        self.divided = Some(divided.map(|(_, var)| var.id()).collect());
    }

    pub(crate) fn divided(&self) -> Option<&HashSet<TensorId>> {
        self.divided.as_ref()
    }

    pub(crate) fn ties(&self) -> &[Tie] {
        &self.ties
    }

    pub(crate) fn failed(&self) -> Option<&Error> {
        self.failed.as_ref()
    }

    pub(crate) fn groups(&self) -> &Groups {
        &self.groups
    }

    /// Brings together what all ranks computed when in a step, on every rank. Every rank must call it; their clocks begin with the
    /// step, so let a [`Communicator::barrier`] precede it.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn measured(&self, spans: &[Span]) -> Result<Plan> {
        Ok(Plan { ranks: comm::all_gather_object(&*self.groups.pp, &spans.to_vec())? })
    }
}

impl fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages: Vec<usize> = self.stages.iter().map(|stage| stage.number).collect();
        write!(
            f,
            "Pipeline(rank {} of {}, stages {stages:?})",
            self.groups.pp.rank(),
            self.groups.pp.world_size()
        )
    }
}

fn all_vars(stages: &[Stage]) -> Vec<(String, Var)> {
    stages.iter().flat_map(|stage| stage.vars.iter().cloned()).collect()
}

/// A batch in equal parts.
fn cut(what: &'static str, batch: &Tensor, micro_batches: usize, expected: usize) -> Result<Vec<Tensor>> {
    let rows = batch.dims().first().copied().unwrap_or(0);
    if rows != micro_batches * expected {
        return Err(Error::BatchSize { what, rows, micro_batches, expected });
    }
    let part = |index: usize| batch.narrow(0, index * expected, expected)?.contiguous();
    (0..micro_batches).map(part).collect::<candle_core::Result<_>>().map_err(Error::during("cutting a batch"))
}

/// None where this rank has no losses.
fn mean(losses: &[Tensor]) -> candle_core::Result<Option<f32>> {
    if losses.is_empty() {
        return Ok(None);
    }
    let number = |loss: &Tensor| loss.to_dtype(DType::F32)?.flatten_all()?.get(0)?.to_scalar::<f32>();
    let numbers: Vec<f32> = losses.iter().map(number).collect::<candle_core::Result<_>>()?;
    Ok(Some(numbers.iter().sum::<f32>() / numbers.len() as f32))
}
