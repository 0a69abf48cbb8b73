//! Executor: runs a rank's actions of a schedule table.

use std::collections::HashMap;
use std::time::Instant;

use candle_core::{Tensor, Var};
use ops::tape::scalar_with_gradient;
use ops::{DeferredGrads, RowContext, activation_bytes, backward, defer_weights};
use training::internal::GradSums;

use crate::average::Average;
use crate::links::{Links, Spec};
use crate::stage::Stage;
use crate::{Action, ActionKind, Error, Result, Span, Table};

/// Stage and micro-batch.
type Cell = (usize, usize);

/// A micro-batch whose forward has run and whose backward has not.
struct LiveActivation {
    input: Option<Var>,
    /// The output of the stage or, for the last stage, the loss.
    output: Tensor,
    /// Bytes of the received input and of the activations, if measured.
    bytes: usize,
}

/// One step of a rank.
pub(crate) struct Run<'a> {
    pub(crate) table: &'a Table,
    pub(crate) specs: &'a [Spec],
    pub(crate) stages: &'a [Stage],
    pub(crate) links: &'a mut Links,
    /// This rank's inputs, by micro-batch; empty unless it has the first stage.
    pub(crate) inputs: Vec<Tensor>,
    pub(crate) targets: Vec<Tensor>,
    pub(crate) loss: &'a dyn Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    pub(crate) before_forward: Option<&'a dyn Fn(Action)>,
    /// By micro-batch; empty if nothing is known of rows.
    pub(crate) row_contexts: Vec<RowContext>,
    /// Whether to run forward only, without dropout and without an autograd graph.
    pub(crate) evaluates: bool,
    pub(crate) gradients: GradSums,
    pub(crate) average: Average<'a>,
    pub(crate) state: State,
}

/// State of a step in progress.
#[derive(Default)]
pub(crate) struct State {
    alive: HashMap<Cell, LiveActivation>,
    deferred: HashMap<Cell, DeferredGrads>,
    /// Inputs and output gradients, by stage and micro-batch, from other stages of this rank or another.
    inputs: HashMap<Cell, Var>,
    gradients: HashMap<Cell, Tensor>,
    /// Gradients to be sent to the previous stage.
    leaving: HashMap<Cell, Tensor>,
    /// By stage: whether its input had a gradient in a micro-batch.
    pub(crate) has_input_gradient: HashMap<usize, bool>,
    /// By micro-batch: the number of this rank's stages whose forward has run.
    forwards: HashMap<usize, usize>,
    pub(crate) losses: Vec<Tensor>,
    pub(crate) spans: Vec<Span>,
    pub(crate) most_alive: usize,
    /// Whether the bytes of activations are measured.
    pub(crate) measures: bool,
    bytes: usize,
    pub(crate) most_bytes: usize,
}

impl State {
    pub(crate) fn measuring(measures: bool) -> Self {
        Self { measures, ..Self::default() }
    }
}

impl Run<'_> {
    /// Runs all actions, in order.
    pub(crate) fn run(&mut self, actions: &[Action]) -> Result<()> {
        let began = Instant::now();
        self.links.begin()?;
        for (index, &action) in actions.iter().enumerate() {
            if !action.kind.is_compute() {
                // A receive lasts until the message has arrived.
                tracing::info_span!("message", action = action.kind.letters())
                    .in_scope(|| self.communicate(action))?;
                continue;
            }
            let start = began.elapsed().as_secs_f64();
            let span = tracing::info_span!(
                "pipeline",
                action = action.kind.letters(),
                stage = action.stage,
                micro_batch = action.micro_batch
            );
            span.in_scope(|| self.compute(action, self.average.completes(index)))?;
            let end = began.elapsed().as_secs_f64();
            self.state.spans.push(Span { action, start, end });
        }
        tracing::info_span!("wait").in_scope(|| self.links.end())
    }

    fn communicate(&mut self, action: Action) -> Result<()> {
        let cell = (action.stage, action.micro_batch);
        match action.kind {
            ActionKind::RecvActivation => {
                let input = self.links.receive(action)?;
                self.state.inputs.insert(cell, input);
            }
            ActionKind::RecvGradient => {
                let gradient = self.links.receive(action)?;
                self.state.gradients.insert(cell, gradient.as_detached_tensor());
            }
            ActionKind::SendActivation => {
                if let Some(alive) = self.state.alive.get(&cell) {
                    self.links.send(action, &alive.output)?;
                }
            }
            _ => {
                if let Some(gradient) = self.state.leaving.remove(&cell) {
                    self.links.send(action, &gradient)?;
                }
            }
        }
        Ok(())
    }

    /// `completes`: this is the stage's last action, after which its gradients are averaged.
    fn compute(&mut self, action: Action, completes: bool) -> Result<()> {
        match action.kind {
            ActionKind::Forward => self.forward(action),
            ActionKind::BackwardWeight => self.weights(action, completes),
            ActionKind::Backward if completes => {
                // In two parts, so that some gradients are averaged while others are computed.
                self.backward(action, true)?;
                self.weights(action, true)
            }
            ActionKind::Backward => self.backward(action, false),
            // Of what is computed, only `BackwardInput` is left.
            _ => self.backward(action, true),
        }
    }

    fn is_last(&self, stage: usize) -> bool {
        stage + 1 == self.table.stages()
    }

    fn forward(&mut self, action: Action) -> Result<()> {
        let Action { stage: number, micro_batch, .. } = action;
        let input = self.state.inputs.remove(&(number, micro_batch));
        let x = match &input {
            // Without a graph, in which the stage would keep what it computes.
            Some(input) if self.evaluates => &input.as_detached_tensor(),
            Some(input) => input.as_tensor(),
            None => &self.inputs[micro_batch],
        };
        if let Some(before) = self.before_forward {
            before(action);
        }
        let stage = find(self.stages, action)?;
        let forward = || stage.forward(x, !self.evaluates);
        let mut output = self.scope(micro_batch, forward).map_err(Error::during(action.to_string()))?;
        self.specs[number].check(&output, action, "an output")?;
        if self.is_last(number) {
            let loss = || (self.loss)(&output, &self.targets[micro_batch]);
            output = self.scope(micro_batch, loss).map_err(Error::during("the loss"))?;
            if output.elem_count() != 1 {
                let (what, got) = ("the loss".to_string(), format!("shape {:?}", output.dims()));
                let help = "it must give one number for each micro-batch".into();
                return Err(Error::InvalidArgument { what, got, help });
            }
            self.state.losses.push(output.detach());
        } else if self.table.sender_after(number).is_none() {
            // The next stage is on this rank, and has a separate graph.
            let input = Var::from_tensor(&output.detach()).map_err(Error::during("a stage's input"))?;
            self.state.inputs.insert((number + 1, micro_batch), input);
        }
        self.end_forward(micro_batch).map_err(Error::during(action.to_string()))?;
        if self.evaluates {
            output = output.detach();
        }
        let bytes = if self.state.measures { alive_bytes(input.as_ref(), &output) } else { 0 };
        self.state.bytes += bytes;
        self.state.most_bytes = self.state.most_bytes.max(self.state.bytes);
        self.state.alive.insert((number, micro_batch), LiveActivation { input, output, bytes });
        self.state.most_alive = self.state.most_alive.max(self.state.alive.len() + self.state.deferred.len());
        Ok(())
    }

    /// After the last of this rank's stages the experts of a micro-batch are known.
    fn end_forward(&mut self, micro_batch: usize) -> candle_core::Result<()> {
        let forwards = self.state.forwards.entry(micro_batch).or_default();
        *forwards += 1;
        let balance = self.row_contexts.get(micro_batch).and_then(|rows| rows.balance.as_ref());
        match balance {
            Some(balance) if *forwards == self.stages.len() => balance.end_forward(),
            _ => Ok(()),
        }
    }

    /// Calls `compute` with what is known of a micro-batch's rows.
    fn scope<T>(&self, micro_batch: usize, compute: impl FnOnce() -> T) -> T {
        match self.row_contexts.get(micro_batch) {
            Some(rows) => rows.scope(compute),
            None => compute(),
        }
    }

    fn backward(&mut self, action: Action, input_only: bool) -> Result<()> {
        let Action { stage: number, micro_batch, .. } = action;
        let cell = (number, micro_batch);
        let during = || Error::during(action.to_string());
        let none = || Error::BadTable { reason: format!("{action}: it has not gone forward") };
        let LiveActivation { input, output, bytes } = self.state.alive.remove(&cell).ok_or_else(none)?;
        self.state.bytes -= bytes;
        let gradient = match self.is_last(number) {
            true => loss_gradient(&output, self.table.micro_batches).map_err(during())?,
            false => self.state.gradients.remove(&cell).ok_or_else(none)?,
        };
        let root = scalar_with_gradient(&output, gradient).map_err(during())?;
        drop(output);
        let mut grads = if input_only {
            let (grads, deferred) = defer_weights(|| backward(&root)).map_err(during())?;
            self.state.deferred.insert(cell, deferred);
            grads
        } else {
            backward(&root).map_err(during())?
        };
        drop(root);
        if let Some(input) = input {
            // An output that does not depend on the input: the gradient is zero.
            let gradient = grads.remove(&input);
            *self.state.has_input_gradient.entry(number).or_default() |= gradient.is_some();
            let gradient = match gradient {
                Some(gradient) => gradient,
                None => input.zeros_like().map_err(during())?,
            };
            self.specs[number - 1].check(&gradient, action, "a gradient of its input")?;
            match self.table.sender_before(number) {
                Some(_) => self.state.leaving.insert(cell, gradient),
                None => self.state.gradients.insert((number - 1, micro_batch), gradient),
            };
        }
        self.gradients.take(&mut grads).map_err(during())
    }

    fn weights(&mut self, action: Action, completes: bool) -> Result<()> {
        let cell = (action.stage, action.micro_batch);
        let Some(deferred) = self.state.deferred.remove(&cell) else { return Ok(()) };
        let gradients = &mut self.gradients;
        if completes {
            return self.average.compute(find(self.stages, action)?, deferred, gradients);
        }
        deferred
            .compute(|id, gradient| gradients.add_shared(id, &gradient))
            .map_err(Error::during(action.to_string()))
    }
}

/// Returns the bytes that are held for backward of a stage and micro-batch: the received input, and the activations.
fn alive_bytes(input: Option<&Var>, output: &Tensor) -> usize {
    let received = input.map_or(0, |input| input.elem_count() * input.dtype().size_in_bytes());
    received + activation_bytes(output, [])
}

fn find(stages: &[Stage], action: Action) -> Result<&Stage> {
    let found = stages.iter().find(|stage| stage.number == action.stage);
    found.ok_or_else(|| Error::BadTable { reason: format!("{action}: another rank's") })
}

/// Returns the gradient of a micro-batch's loss: its share of the batch's mean.
fn loss_gradient(loss: &Tensor, micro_batches: usize) -> candle_core::Result<Tensor> {
    Tensor::new(1.0 / micro_batches as f64, loss.device())?.to_dtype(loss.dtype())?.reshape(loss.shape())
}
