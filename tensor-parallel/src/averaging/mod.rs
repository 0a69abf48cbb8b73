//! Data-parallel gradient averaging over the replicas of the divided model, overlapped with backward.

mod pass;
mod weight;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, autograd};
use strategy::BucketAverage;
use training::internal::GradSums;

use crate::{Error, Parameter, Result};

use pass::{BUCKET_BYTES, DirectGradient, Pass};
pub(crate) use weight::Weight;

/// The data-parallel group, and the gradients that are being averaged over it.
#[derive(Debug)]
pub(crate) struct Averaging {
    dp: Arc<dyn Communicator>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Sums of the gradients that layers have delivered, by thread of the backward and by parameter.
    sums: HashMap<(ThreadId, usize), Tensor>,
    /// Threads that run a backward of the model, each with the state of its pass.
    passes: HashMap<ThreadId, Pass>,
    /// Parameters whose layers deliver their gradients directly, by index.
    given: BTreeMap<usize, DirectGradient>,
}

impl Averaging {
    pub(crate) fn new(dp: Arc<dyn Communicator>) -> Self {
        Self { dp, state: Mutex::default() }
    }

    /// Creates the scalar that stands for a parameter in the autograd graph. Layers deliver the parameter's gradient, which
    /// has the parameter's size, through [`deliver`](Self::deliver) instead of through the scalar. Backward reaches the scalar when
    /// all layers that use the parameter have delivered theirs: once for each recomputed part, and once outside of them.
    pub(crate) fn token(self: &Arc<Self>, index: usize, var: &Var) -> Result<Tensor> {
        let (averaging, number) = (self.clone(), Tensor::zeros((), var.dtype(), var.device())?);
        self.lock().given.insert(index, DirectGradient::new(var));
        let arrived = move |_: &Tensor| Ok(vec![averaging.complete(index)?]);
        Ok(autograd::custom("averaged_parameter", &[var.as_tensor()], number, arrived)?)
    }

    /// Receives a gradient from a layer.
    pub(crate) fn deliver(&self, index: usize, gradient: Tensor) -> candle_core::Result<()> {
        let key = (thread::current().id(), index);
        let sums = &mut self.lock().sums;
        let sum = match sums.remove(&key) {
            Some(before) => add(before, &gradient)?,
            None => gradient.contiguous()?,
        };
        sums.insert(key, sum);
        Ok(())
    }

    /// Records that a layer has used the parameter in a part that backward recomputes.
    fn used_in_part(&self, index: usize) {
        if let Some(parameter) = self.lock().given.get_mut(&index) {
            parameter.is_in_part();
        }
    }

    /// Called when a parameter's gradient in a graph is complete: takes it in a backward of the model, and returns it to
    /// candle in any other backward.
    fn complete(&self, index: usize) -> comm::Result<Option<Tensor>> {
        let state = &mut *self.lock();
        let thread = thread::current().id();
        let gradient = state.sums.remove(&(thread, index));
        let Some(pass) = state.passes.get_mut(&thread) else { return Ok(gradient) };
        // A sum with earlier passes is of a wider dtype.
        let dtype = state.given.get(&index).map(DirectGradient::dtype);
        let gradient = match (gradient, dtype) {
            (Some(gradient), Some(dtype)) => Some(gradient.to_dtype(dtype)?),
            (gradient, _) => gradient,
        };
        pass.receive(index, gradient)?;
        pass.send_complete()?;
        Ok(None)
    }

    /// Runs `backward`, and returns its gradients, averaged together with the sums `held` of earlier passes, by parameter.
    pub(crate) fn backward(
        &self,
        parameters: &[Parameter],
        mut held: Option<GradSums>,
        backward: impl FnOnce() -> Result<GradStore>,
    ) -> Result<GradStore> {
        let thread = thread::current().id();
        self.forget();
        {
            let state = &mut *self.lock();
            let pass = Pass::new(&state.given, BucketAverage::new(self.dp.clone(), BUCKET_BYTES));
            state.passes.insert(thread, pass);
            // What layers deliver is added to it.
            if let Some(held) = &mut held {
                for &index in state.given.keys() {
                    let var = parameters[index].var();
                    state.sums.extend(held.of(var).map(|sum| ((thread, index), sum.clone())));
                    held.unset(var);
                }
            }
        }
        let ended = backward();
        let (pass, unreached) = {
            let state = &mut *self.lock();
            (
                state.passes.remove(&thread),
                state.sums.extract_if(|(of, _), _| *of == thread).collect::<Vec<_>>(),
            )
        };
        let (Some(mut pass), mut gradients) = (pass, ended?) else {
            return Err(Error::invalid("a backward", "no pass", "this is a mistake in tensor-parallel"));
        };
        for (index, times) in &pass.come {
            self.lock().given.entry(*index).and_modify(|parameter| parameter.record_arrivals(*times));
        }
        for ((_, index), sum) in unreached {
            pass.receive(index, Some(sum.to_dtype(parameters[index].var().dtype())?))?;
        }
        held.map_or(Ok(()), |held| add_held(held, parameters, &mut gradients))?;
        self.finish(pass, parameters, &mut gradients)?;
        Ok(gradients)
    }

    /// Drops what a failed backward on this thread may have left behind.
    pub(crate) fn forget(&self) {
        let thread = thread::current().id();
        self.lock().sums.retain(|(of, _), _| *of != thread);
    }

    /// Sends the remaining buckets, waits for all, and adds the averages to `gradients`. If this replica has no gradient of a
    /// parameter, it counts as zero; if no replica has one, the parameter has none.
    fn finish(&self, mut pass: Pass, parameters: &[Parameter], gradients: &mut GradStore) -> Result<()> {
        for bucket in pass.buckets.split_off(pass.sent) {
            let own = |index| Ok((index, own_or_zeros(pass.waiting.remove(&index), &parameters[index])?));
            let gradients = bucket.into_iter().map(own).collect::<Result<Vec<_>>>()?;
            pass.send(gradients)?;
        }
        let Pass { mut late, present, mut average, in_flight, .. } = pass;
        let mut plain: Vec<Option<Tensor>> = parameters.iter().map(|of| gradients.remove(of.var())).collect();
        let numbers = || 0..parameters.len();
        let given: Vec<bool> = numbers().map(|index| present.contains(&index)).collect();
        let others = plain.iter().map(Option::is_some).collect();
        let after = numbers().map(|index| late.contains_key(&index)).collect();
        let Some(first) = parameters.first() else { return Ok(()) };
        let any = average.any(&[given, others, after].concat(), first.var().device())?;
        let _span = tracing::info_span!("wait for averages").entered();
        average.wait()?;
        let any: Vec<bool> = any.to_vec1::<u8>()?.into_iter().map(|flag| flag > 0).collect();
        let [is_given, is_plain, is_late] =
            std::array::from_fn(|kind| &any[kind * parameters.len()..][..parameters.len()]);
        let (mut rest, mut together) = (Vec::new(), BucketAverage::new(self.dp.clone(), usize::MAX));
        for index in numbers().filter(|index| is_plain[*index]) {
            rest.push((index, own_or_zeros(plain[index].take(), &parameters[index])?));
        }
        for index in numbers().filter(|index| is_late[*index]) {
            rest.push((index, own_or_zeros(late.remove(&index), &parameters[index])?));
        }
        rest.iter().try_for_each(|(_, gradient)| together.add(gradient))?;
        together.wait()?;
        let mut averaged = in_flight;
        averaged.retain(|(index, _)| is_given[*index]);
        averaged.extend(rest);
        for (index, gradient) in averaged {
            let var = parameters[index].var();
            // A weight may be used both by a layer that delivers its gradient directly and by one that does not, and part of
            // its gradient may be late.
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

fn own_or_zeros(own: Option<Tensor>, parameter: &Parameter) -> Result<Tensor> {
    Ok(match own {
        Some(gradient) => gradient.contiguous()?,
        None => parameter.var().as_detached_tensor().zeros_like()?,
    })
}

/// Adds the sums of earlier passes to gradients.
pub(crate) fn add_held(
    mut held: GradSums,
    parameters: &[Parameter],
    gradients: &mut GradStore,
) -> Result<()> {
    held.take(gradients)?;
    let mut sums = held.finish()?;
    for var in parameters.iter().map(Parameter::var) {
        if let Some(sum) = sums.remove(var) {
            gradients.insert(var, sum);
        }
    }
    Ok(())
}

/// Adds a gradient to a sum, in the sum's dtype.
fn add(sum: Tensor, gradient: &Tensor) -> candle_core::Result<Tensor> {
    let dtype = sum.dtype();
    sum + gradient.to_dtype(dtype)?
}
