//! Gradients averaged over copies of the divided model, while backward computes those of earlier layers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, Operation, ReduceOp, Work, autograd};

use crate::{Parameter, Result};

/// Gradients go out together once there are so many bytes of them; what is left goes in one after backward. As large as
/// PyTorch's first bucket.
const BUCKET_BYTES: usize = 1 << 20;

/// The data-parallel group, and the gradients on their way over it.
#[derive(Debug)]
pub(crate) struct Averaging {
    dp: Arc<dyn Communicator>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What layers have given so far, by the thread whose backward they are in and by parameter.
    sums: HashMap<(ThreadId, usize), Tensor>,
    /// Threads in a backward of the model, and what each has to send.
    passes: HashMap<ThreadId, Pass>,
}

/// One backward.
#[derive(Debug, Default)]
struct Pass {
    /// Complete and not sent yet.
    waiting: Vec<(usize, Tensor)>,
    bytes: usize,
    flights: Vec<Flight>,
}

/// Gradients that are being averaged.
#[derive(Debug)]
struct Flight {
    gradients: Vec<(usize, Tensor)>,
    work: Work,
}

impl Averaging {
    pub(crate) fn new(dp: Arc<dyn Communicator>) -> Self {
        Self { dp, state: Mutex::default() }
    }

    /// What a graph has in a parameter's place: a number that depends on it. Backward comes there as soon as all layers that use
    /// the parameter have given their gradients, which are as large as the parameter and do not go by way of the number.
    pub(crate) fn token(self: &Arc<Self>, index: usize, var: &Var) -> Result<Tensor> {
        let (averaging, number) = (self.clone(), Tensor::zeros((), var.dtype(), var.device())?);
        let arrived = move |_: &Tensor| Ok(vec![averaging.complete(index)?]);
        Ok(autograd::custom("averaged_parameter", &[var.as_tensor()], number, arrived)?)
    }

    /// Takes a gradient from a layer.
    pub(crate) fn give(&self, index: usize, gradient: Tensor) -> candle_core::Result<()> {
        let key = (thread::current().id(), index);
        let sums = &mut self.lock().sums;
        let sum = match sums.remove(&key) {
            Some(before) => (before + gradient)?,
            None => gradient.contiguous()?,
        };
        sums.insert(key, sum);
        Ok(())
    }

    /// All of a parameter's gradient is there: sends it in a backward of the model, and gives it to candle in any other.
    fn complete(&self, index: usize) -> comm::Result<Option<Tensor>> {
        let mut state = self.lock();
        let thread = thread::current().id();
        let gradient = state.sums.remove(&(thread, index));
        let Some(pass) = state.passes.get_mut(&thread) else { return Ok(gradient) };
        if let Some(gradient) = gradient {
            pass.bytes += gradient.elem_count() * gradient.dtype().size_in_bytes();
            pass.waiting.push((index, gradient));
        }
        if pass.bytes >= BUCKET_BYTES {
            pass.bytes = 0;
            let gradients = std::mem::take(&mut pass.waiting);
            let _span = tracing::info_span!("bucket", parameters = gradients.len()).entered();
            let work = self.dp.submit(average(&gradients))?;
            pass.flights.push(Flight { gradients, work });
        }
        Ok(None)
    }

    /// Runs a backward; its gradients, averaged.
    pub(crate) fn backward(
        &self,
        parameters: &[Parameter],
        backward: impl FnOnce() -> Result<GradStore>,
    ) -> Result<GradStore> {
        let thread = thread::current().id();
        {
            let mut state = self.lock();
            // A backward that failed may have left some.
            state.sums.retain(|(of, _), _| *of != thread);
            state.passes.insert(thread, Pass::default());
        }
        let ended = backward();
        let pass = self.lock().passes.remove(&thread).unwrap_or_default();
        let mut gradients = ended?;
        self.finish(pass, parameters, &mut gradients)?;
        Ok(gradients)
    }

    /// Sends what is left, waits for all, and puts it to the rest.
    fn finish(&self, pass: Pass, parameters: &[Parameter], gradients: &mut GradStore) -> Result<()> {
        let Pass { mut waiting, flights, .. } = pass;
        for (index, parameter) in parameters.iter().enumerate() {
            if let Some(gradient) = gradients.remove(parameter.var()) {
                waiting.push((index, gradient.contiguous()?));
            }
        }
        let _span = tracing::info_span!("wait for averages").entered();
        if !waiting.is_empty() {
            self.dp.run(average(&waiting))?;
        }
        let mut averaged = Vec::new();
        for Flight { gradients, work } in flights {
            work.wait()?;
            averaged.extend(gradients);
        }
        averaged.extend(waiting);
        for (index, gradient) in averaged {
            let var = parameters[index].var();
            // A weight may be used by a layer that gives its gradient itself, and by one that does not.
            let sum = match gradients.remove(var) {
                Some(before) => (before + gradient)?,
                None => gradient,
            };
            gradients.insert(var, sum);
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn average(gradients: &[(usize, Tensor)]) -> Operation {
    let tensors = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
    Operation::AllReduceCoalesced { tensors, op: ReduceOp::Avg }
}

/// A weight as a layer sees it that computes its gradient itself.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    value: Tensor,
    /// Where gradients are averaged: the token, and the parameter's number.
    averaged: Option<(Tensor, usize, Arc<Averaging>)>,
}

impl Weight {
    pub(crate) fn new(value: Tensor, averaged: Option<(Tensor, usize, Arc<Averaging>)>) -> Self {
        Self { value, averaged }
    }

    /// Its numbers, outside of the graph.
    pub(crate) fn value(&self) -> Tensor {
        self.value.detach()
    }

    /// The variable.
    pub(crate) fn variable(&self) -> &Tensor {
        &self.value
    }

    /// What an operation has as its input.
    pub(crate) fn node(&self) -> &Tensor {
        self.averaged.as_ref().map_or(&self.value, |(token, ..)| token)
    }

    /// What an operation answers as the gradient of that input, where the weight's is this one.
    pub(crate) fn gradient(&self, gradient: Tensor) -> candle_core::Result<Tensor> {
        let Some((token, index, averaging)) = &self.averaged else { return Ok(gradient) };
        averaging.give(*index, gradient)?;
        token.zeros_like()
    }
}
