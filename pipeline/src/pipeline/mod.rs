//! `Pipeline`: runs training steps of one rank's stages.

mod build;
mod forward;

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::thread::Builder;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, TensorId, Var};
use comm::Stats;
use ops::RowContext;
use strategy::{ParameterGroups, Region};
use training::internal::{GradSums, Runs};

use crate::average::Average;
use crate::executor::{Run, State};
use crate::failure_reports::FailureReports;
use crate::first_audit::{Audited, FirstAudit};
use crate::groups::Groups;
use crate::links::{Links, Spec};
use crate::stage::Stage;
use crate::tied::{self, Tie};
use crate::{Action, Error, Plan, Result, Schedule, Span, Table};

type Loss = Box<dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor> + Send>;

/// Result of a step on one rank.
#[derive(Debug)]
pub struct StepOutput {
    /// Mean of the micro-batches' losses, on the rank that has the last stage.
    pub loss: Option<f32>,
    /// Gradients of this rank's variables for the whole batch, for the optimizer.
    pub grads: GradStore,
    /// Computations of this rank, with times in seconds since the start of its step.
    pub spans: Vec<Span>,
    /// Largest number of activations alive at once: pairs of stage and micro-batch.
    pub most_alive: usize,
    /// Largest number of bytes that these held at once, if measured ([`Pipeline::measure_activations`]).
    pub activation_bytes: Option<usize>,
}

/// One rank's stages of a model, and its links to the other ranks.
///
/// # Memory
/// The parameters of this rank's stages, their gradients, and as many micro-batches as the schedule keeps alive
/// ([`Schedule::live`]); two message buffers per link.
///
/// # Failure
/// If a step fails, for any reason, the ranks are out of step: the rank reports the cause to the others and closes its links,
/// so that they fail with the same cause; every later call fails immediately with it.
pub struct Pipeline {
    groups: Groups,
    /// Groups of the same ranks as those that gradients are averaged over, for averaging; closed at the first failure.
    average_groups: Option<ParameterGroups>,
    schedule: Schedule,
    stages: Vec<Stage>,
    specs: Vec<Spec>,
    ties: Vec<Tie>,
    links: Option<Links>,
    /// Table and links for evaluation; created when first used.
    evaluation: Option<(Table, Links)>,
    failures: Arc<FailureReports>,
    loss: Loss,
    before_forward: Option<Box<dyn Fn(Action) + Send>>,
    row_contexts: Vec<RowContext>,
    measures: bool,
    device: Device,
    completions: Vec<usize>,
    bucket_bytes: usize,
    rows: usize,
    /// Checks the first step for missing gradients; `None` after it.
    first_audit: Option<FirstAudit>,
    /// Variables of which the tensor-parallel ranks have parts; `None` until that was declared.
    divided: Option<HashMap<TensorId, Region>>,
    /// For each tied variable the name of the first of its set.
    tied_names: HashMap<String, String>,
    /// All variables of the stages, by whether they are trained.
    parameters: Vec<(String, Var)>,
    buffers: Vec<(String, Var)>,
    /// The last components of names of variables that are not trained.
    buffer_names: Vec<String>,
    failed: Option<Error>,
}

impl Pipeline {
    /// Sets a hook that is called before each forward pass of a stage, e.g. to seed dropout independently of the schedule.
    pub fn before_forward(&mut self, hook: impl Fn(Action) + Send + 'static) {
        self.before_forward = Some(Box::new(hook));
    }

    /// Sets what layers know of the rows of the next step or evaluation, such as the documents of packed rows, and the keys of
    /// their random numbers ([`Dropout::by_row`]): one for each micro-batch, on every rank.
    ///
    /// [`Dropout::by_row`]: ops::Dropout::by_row
    pub fn set_row_contexts(&mut self, rows: Vec<RowContext>) {
        self.row_contexts = rows;
    }

    /// Runs one step: forward and backward of all micro-batches. The first stage's rank needs the batch, the last stage's
    /// rank the target.
    ///
    /// # Shapes
    /// As many micro-batches as the schedule has, concatenated along the first dimension, each of the example's size.
    ///
    /// # Errors
    /// A batch of the wrong size; [`Error::ShapeChanged`]; errors of a stage; [`Error::PeerFailed`] if another rank failed in
    /// this way.
    pub fn step(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<StepOutput> {
        self.check_ready()?;
        let step = self.try_step(input, target);
        self.close_if_failed(&step);
        step
    }

    fn check_ready(&self) -> Result<()> {
        match &self.failed {
            Some(first) => Err(first.clone()),
            None if self.links.is_none() => {
                let what = "the example of a pipeline".to_string();
                let help =
                    "call Pipeline::prepare with an input of one micro-batch before the first step".into();
                Err(Error::InvalidArgument { what, got: "none".into(), help })
            }
            None => Ok(()),
        }
    }

    fn close_if_failed<T>(&mut self, result: &Result<T>) {
        let Err(error) = result else { return };
        self.failed = Some(error.clone());
        self.failures.report(error);
        // Closing the connections makes the other ranks look for a report. All are closed at the same time, since ranks may
        // wait for one another in any of them.
        let (links, evaluation) = (self.links.take(), self.evaluation.take());
        let (ties, groups) = (std::mem::take(&mut self.ties), self.average_groups.take());
        let first_audit = self.first_audit.take();
        std::thread::scope(|scope| {
            // If no thread can be started, it is dropped here, before the others.
            let _ = Builder::new().spawn_scoped(scope, move || drop(links));
            let _ = Builder::new().spawn_scoped(scope, move || drop(evaluation));
            let _ = Builder::new().spawn_scoped(scope, move || drop(ties));
            let _ = Builder::new().spawn_scoped(scope, move || drop(first_audit));
            for group in groups.into_iter().flat_map(ParameterGroups::into_groups) {
                let _ = Builder::new().spawn_scoped(scope, move || drop(group));
            }
        });
    }

    fn try_step(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<StepOutput> {
        let (inputs, targets) = self.micro_batches(input, target)?;
        let table = self.schedule.table();
        let contexts = self.row_contexts.len();
        if contexts > 0 && contexts != table.micro_batches {
            let (what, got) = ("the row contexts of a step".to_string(), format!("{contexts} of them"));
            let help = format!("give one for each of the {} micro-batches", table.micro_batches);
            return Err(Error::InvalidArgument { what, got, help });
        }
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
            row_contexts: std::mem::take(&mut self.row_contexts),
            evaluates: false,
            gradients: GradSums::new(vars),
            average: Average::new(
                self.average_groups.as_ref(),
                &self.failures,
                &self.completions,
                self.bucket_bytes,
            ),
            state: State::measuring(self.measures),
        };
        run.run(&table.actions[self.groups.pp.rank()])?;
        tracing::info_span!("wait").in_scope(|| run.average.wait(&mut run.gradients))?;
        let (mut gradients, state) = (run.gradients, run.state);
        tied::add(&self.ties, &mut gradients, &self.failures)?;
        if let Some(first) = &self.first_audit {
            self.audit(first, &gradients, &state.has_input_gradient)?;
            self.first_audit = None;
        }
        let State { losses, spans, most_alive, measures, most_bytes, .. } = state;
        let activation_bytes = measures.then_some(most_bytes);
        let loss = mean(&losses).map_err(Error::during("the loss"))?;
        let grads = gradients.finish().map_err(Error::during("the gradients"))?;
        Ok(StepOutput { loss, grads, spans, most_alive, activation_bytes })
    }

    /// Applies [`PipelineConfig::audit`](crate::PipelineConfig::audit).
    fn audit(&self, first: &FirstAudit, grads: &GradSums, inputs: &HashMap<usize, bool>) -> Result<()> {
        let tied = self.ties.iter().flat_map(|tie| tie.local_and_group().0);
        let tied: HashSet<TensorId> = tied.map(|var| var.id()).collect();
        let buffers: HashSet<TensorId> = self.buffers.iter().map(|(_, var)| var.id()).collect();
        let all =
            self.stages.iter().flat_map(|stage| stage.vars.iter().map(move |(name, var)| (stage, name, var)));
        let parameters = all.filter(|(.., var)| var.dtype().is_float() && !buffers.contains(&var.id()));
        let own = parameters.map(|(stage, name, var)| Audited {
            stage: stage.number,
            name: name.clone(),
            dims: var.dims().to_vec(),
            has_gradient: grads.of(var).is_some(),
            is_tied: tied.contains(&var.id()),
        });
        let cut = inputs.iter().filter(|(_, has)| !**has).map(|(stage, _)| *stage).max();
        first.act(own.collect(), cut, &self.failures)
    }

    /// Returns the mean loss of a batch on the rank that has the last stage, `None` on the others. Runs forward only, in
    /// evaluation mode (no dropout). Every rank must call it, with the arguments that [`step`](Self::step) needs.
    ///
    /// # Cost
    /// The schedule's forward passes and messages; the first call creates separate links.
    ///
    /// # Errors
    /// Those of [`step`](Self::step).
    pub fn evaluate(&mut self, input: Option<&Tensor>, target: Option<&Tensor>) -> Result<Option<f32>> {
        self.check_ready()?;
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
                    Links::new(&*self.groups.pp, self.failures.clone(), &table, self.specs.clone(), &device)?;
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
            row_contexts: std::mem::take(&mut self.row_contexts),
            evaluates: true,
            gradients: GradSums::default(),
            average: Average::new(None, &self.failures, &[], 0),
            state: State::default(),
        };
        run.run(&table.actions[self.groups.pp.rank()])?;
        let loss = mean(&run.state.losses).map_err(Error::during("the loss"));
        self.evaluation = Some((table, links));
        loss
    }

    /// Returns the micro-batches of a batch, as far as this rank needs them.
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

    /// Returns the parameters' variables of this rank's stages, for an optimizer.
    pub fn vars(&self) -> Vec<Var> {
        self.parameters.iter().map(|(_, var)| var.clone()).collect()
    }

    /// Returns the same with their names, ordered by stage, then by name.
    pub fn named_vars(&self) -> Vec<(String, Var)> {
        self.parameters.clone()
    }

    /// Returns the variables of this rank's stages that are state and not parameters
    /// ([`Modules::buffers`](crate::Modules::buffers)), by name.
    pub fn buffers(&self) -> &[(String, Var)] {
        &self.buffers
    }

    /// Sets whether steps measure the bytes of activations ([`StepOutput::activation_bytes`]), which costs a traversal of each
    /// graph. Initially off.
    pub fn measure_activations(&mut self, measures: bool) {
        self.measures = measures;
    }

    /// Returns this rank's traffic between stages, with data-parallel replicas, and for tied variables. Waits until the sends of the last step
    /// have been received.
    pub fn stats(&self) -> Stats {
        let between = self.links.as_ref().map(Links::stats).unwrap_or_default();
        let averages = self.average_groups.iter().flat_map(ParameterGroups::groups);
        let groups = averages.chain(self.ties.iter().filter_map(Tie::group));
        groups.fold(between, |sum, group| sum + group.stats())
    }

    /// Returns the schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Declares which variables are divided over the ranks of [`PipelineConfig::tp`](crate::PipelineConfig::tp): `divided`
    /// returns the shape of the whole variable of this name, and which of its elements this rank has, e.g.
    /// `Shards::divided`. Each of these ranks holds all other variables whole, with the same values. Required by the norm of
    /// gradients, checkpoints, files and [`check_parameters`](Self::check_parameters) if there are several such ranks.
    pub fn set_divided(&mut self, divided: impl Fn(&str) -> Option<(Vec<usize>, Runs)>) {
        let regions = self.parameters.iter().filter_map(|(name, var)| {
            let (dims, runs) = divided(name)?;
            Some((var.id(), Region { dims, runs, window: 0..runs.len * runs.count }))
        });
        self.divided = Some(regions.collect());
    }

    /// Returns what was declared by [`set_divided`](Self::set_divided).
    pub(crate) fn divided_for(&self, what: &'static str) -> Result<Cow<'_, HashMap<TensorId, Region>>> {
        let several = self.groups.tp.as_ref().is_some_and(|tp| tp.world_size() > 1);
        match &self.divided {
            Some(divided) => Ok(Cow::Borrowed(divided)),
            None if several => Err(Error::DividedUnknown { what }),
            None => Ok(Cow::default()),
        }
    }

    pub(crate) fn tied_names(&self) -> &HashMap<String, String> {
        &self.tied_names
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

    /// Gathers the measured spans of a step from all ranks, on every rank. Every rank must call it. Times are relative to the
    /// start of each rank's step, so call [`comm::Communicator::barrier`] before the step.
    ///
    /// # Errors
    /// Failures of communication.
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

/// Divides a batch into equal parts.
fn cut(what: &'static str, batch: &Tensor, micro_batches: usize, expected: usize) -> Result<Vec<Tensor>> {
    let rows = batch.dims().first().copied().unwrap_or(0);
    if rows != micro_batches * expected {
        return Err(Error::BatchSize { what, rows, micro_batches, expected });
    }
    let part = |index: usize| batch.narrow(0, index * expected, expected)?.contiguous();
    (0..micro_batches).map(part).collect::<candle_core::Result<_>>().map_err(Error::during("cutting a batch"))
}

/// Returns the mean; `None` if this rank has no losses.
fn mean(losses: &[Tensor]) -> candle_core::Result<Option<f32>> {
    if losses.is_empty() {
        return Ok(None);
    }
    let number = |loss: &Tensor| loss.to_dtype(DType::F32)?.flatten_all()?.get(0)?.to_scalar::<f32>();
    let numbers: Vec<f32> = losses.iter().map(number).collect::<candle_core::Result<_>>()?;
    Ok(Some(numbers.iter().sum::<f32>() / numbers.len() as f32))
}
