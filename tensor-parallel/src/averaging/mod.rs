//! Data-parallel gradient averaging over the replicas of the divided model, overlapped with backward.

mod pass;
mod weight;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, ThreadId};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::{Communicator, Operation, ReduceOp, autograd};

use crate::{Parameter, Result};

use pass::{DirectGradient, Pass, PendingBucket};
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
        self.lock().given.insert(index, DirectGradient::new(var.elem_count() * var.dtype().size_in_bytes()));
        let arrived = move |_: &Tensor| Ok(vec![averaging.complete(index)?]);
        Ok(autograd::custom("averaged_parameter", &[var.as_tensor()], number, arrived)?)
    }

    /// Receives a gradient from a layer.
    pub(crate) fn deliver(&self, index: usize, gradient: Tensor) -> candle_core::Result<()> {
        let key = (thread::current().id(), index);
        let sums = &mut self.lock().sums;
        let sum = match sums.remove(&key) {
            Some(before) => (before + gradient)?,
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
        let mut state = self.lock();
        let thread = thread::current().id();
        let gradient = state.sums.remove(&(thread, index));
        let Some(pass) = state.passes.get_mut(&thread) else { return Ok(gradient) };
        pass.receive(index, gradient)?;
        while let Some(gradients) = pass.next() {
            let _span = tracing::info_span!("bucket", parameters = gradients.len()).entered();
            let work = self.dp.submit(average(&gradients))?;
            pass.flights.push(PendingBucket { gradients, work });
        }
        Ok(None)
    }

    /// Runs `backward`, and returns its gradients, averaged.
    pub(crate) fn backward(
        &self,
        parameters: &[Parameter],
        backward: impl FnOnce() -> Result<GradStore>,
    ) -> Result<GradStore> {
        let thread = thread::current().id();
        {
            let mut state = self.lock();
            // A failed backward may have left some behind.
            state.sums.retain(|(of, _), _| *of != thread);
            let pass = Pass::new(&state.given);
            state.passes.insert(thread, pass);
        }
        let ended = backward();
        let pass = self.lock().passes.remove(&thread).unwrap_or_default();
        let mut gradients = ended?;
        for (index, times) in &pass.come {
            self.lock().given.entry(*index).and_modify(|parameter| parameter.record_arrivals(*times));
        }
        self.finish(pass, parameters, &mut gradients)?;
        Ok(gradients)
    }

    /// Sends the remaining buckets, waits for all, and adds the averages to `gradients`. If this replica has no gradient of a
    /// parameter, it counts as zero; if no replica has one, the parameter has none.
    fn finish(&self, pass: Pass, parameters: &[Parameter], gradients: &mut GradStore) -> Result<()> {
        let Pass { buckets, sent, mut waiting, mut late, present, mut flights, .. } = pass;
        for bucket in &buckets[sent..] {
            let own = |&index: &usize| Ok((index, own_or_zeros(waiting.remove(&index), &parameters[index])?));
            let gradients = bucket.iter().map(own).collect::<Result<Vec<_>>>()?;
            let work = self.dp.submit(average(&gradients))?;
            flights.push(PendingBucket { gradients, work });
        }
        let mut plain: Vec<Option<Tensor>> = parameters.iter().map(|of| gradients.remove(of.var())).collect();
        let numbers = || 0..parameters.len();
        let given: Vec<bool> = numbers().map(|index| present.contains(&index)).collect();
        let others = plain.iter().map(Option::is_some).collect();
        let after = numbers().map(|index| late.contains_key(&index)).collect();
        let [is_given, is_plain, is_late] = self.any_replica([given, others, after], parameters)?;
        let _span = tracing::info_span!("wait for averages").entered();
        let mut rest = Vec::new();
        for index in numbers().filter(|index| is_plain[*index]) {
            rest.push((index, own_or_zeros(plain[index].take(), &parameters[index])?));
        }
        for index in numbers().filter(|index| is_late[*index]) {
            rest.push((index, own_or_zeros(late.remove(&index), &parameters[index])?));
        }
        if !rest.is_empty() {
            self.dp.run(average(&rest))?;
        }
        let mut averaged = Vec::new();
        for PendingBucket { gradients, work } in flights {
            work.wait()?;
            averaged.extend(gradients.into_iter().filter(|(index, _)| is_given[*index]));
        }
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

    /// Combines flags over the replicas: true where any replica has true.
    fn any_replica<const KINDS: usize>(
        &self,
        own: [Vec<bool>; KINDS],
        parameters: &[Parameter],
    ) -> Result<[Vec<bool>; KINDS]> {
        let Some(first) = parameters.first() else { return Ok(own) };
        let flags: Vec<u8> = own.iter().flatten().map(|flag| u8::from(*flag)).collect();
        let tensor = Tensor::new(flags, first.var().device())?;
        self.dp.run(Operation::AllReduce { tensor: tensor.clone(), op: ReduceOp::Max })?;
        let flags: Vec<bool> = tensor.to_vec1::<u8>()?.into_iter().map(|flag| flag > 0).collect();
        Ok(std::array::from_fn(|kind| flags[kind * parameters.len()..][..parameters.len()].to_vec()))
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

fn average(gradients: &[(usize, Tensor)]) -> Operation {
    let tensors = gradients.iter().map(|(_, gradient)| gradient.clone()).collect();
    Operation::AllReduceCoalesced { tensors, op: ReduceOp::Avg }
}
