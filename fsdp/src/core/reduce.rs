//! Reducing a unit's gradients: averaged over ranks, each of which keeps its shard.

use candle_core::{DType, Tensor};
use comm::{Operation, ReduceOp, Work};
use strategy::ParameterGroups;
use training::internal::{BackwardOwner, backward_owner};

use super::{Core, State};
use crate::built::{BuiltUnit, ParamIndex};
use crate::layout::Part;
use crate::{Error, Result, lock, storage};

/// A unit whose gradients are being averaged.
pub(super) struct PendingReduction {
    unit: usize,
    /// The gradient of this rank's shard, complete when all operations have finished.
    shard: Tensor,
    /// By part: this rank's piece, unless the operation writes it directly into `shard`; and the reduce-scatter.
    parts: Vec<(Option<Tensor>, Option<Work>)>,
    /// Bytes of the whole gradients, which are freed when the parts are complete.
    bytes: usize,
    /// The all-reduces over replicas, the final operations, when all others have finished.
    last: Option<Vec<Work>>,
}

impl Core {
    /// Receives a gradient; called by the parameter's hook during backward.
    pub(crate) fn receive(&self, index: ParamIndex, grad: &Tensor) -> Result<()> {
        let built = &self.units[index.unit];
        match backward_owner(self) {
            BackwardOwner::Nobody => return Err(Error::OutsideBackward { unit: built.name.clone() }),
            // The loss of another model depends on this model; this model's gradients are not wanted.
            BackwardOwner::Another => return Ok(()),
            BackwardOwner::This => {}
        }
        let state = &mut *lock(&self.state);
        let unit = &mut state.units[index.unit];
        let sum_dtype = sum_dtype(built.dtype, self.reduce_dtype(built));
        let before = unit.grads[index.param].take();
        let grad = match &before {
            Some(sum) => (sum.to_dtype(sum_dtype)? + grad.to_dtype(sum_dtype)?)?,
            None if state.synchronise => grad.to_dtype(self.reduce_dtype(built))?,
            None => grad.to_dtype(sum_dtype)?,
        };
        self.gradients.add(bytes(&grad));
        self.gradients.sub(before.as_ref().map_or(0, bytes));
        unit.grads[index.param] = Some(grad);
        // The gradient of a recomputation is not the one that is awaited in the loss's graph.
        let was_awaited = ops::recomputed_node().is_none() && std::mem::take(&mut unit.awaited[index.param]);
        let is_last = was_awaited && unit.all_in_graph && !unit.awaited.contains(&true);
        if is_last { self.reduce(state, index.unit) } else { Ok(()) }
    }

    fn reduce_dtype(&self, built: &BuiltUnit) -> DType {
        self.config.mixed_precision.reduce_dtype.unwrap_or(built.dtype)
    }

    /// Starts to average the gradients of a unit, if it has any and this backward averages. Later in the same backward,
    /// recomputation may produce more: they are averaged separately, and added.
    pub(super) fn reduce(&self, state: &mut State, unit: usize) -> Result<()> {
        if !state.synchronise || state.units[unit].grads.iter().all(Option::is_none) {
            return Ok(());
        }
        let reduction = self.start_reduce(state, unit)?;
        // At most two units' whole gradients at a time: those of this unit, and those of the unit that backward computes
        // next.
        self.finish_reductions(state)?;
        state.pending.push_back(reduction);
        if self.groups.shard.is_none() {
            self.finish_reductions(state)?;
        }
        Ok(())
    }

    /// Drops the gradients of backwards that did not communicate.
    pub(super) fn forget_gradients(&self, state: &mut State) {
        state.accumulating = false;
        for unit in &mut state.units {
            let all = unit.grads.iter_mut().filter_map(Option::take);
            all.for_each(|gradient| self.gradients.sub(bytes(&gradient)));
        }
    }

    fn start_reduce(&self, state: &mut State, unit: usize) -> Result<PendingReduction> {
        state.record_communication(1, unit);
        let built = &self.units[unit];
        let span = tracing::info_span!("reduce", unit = built.name);
        let _entered = span.enter();
        let grads = std::mem::replace(&mut state.units[unit].grads, vec![None; built.params.len()]);
        for (param, _) in grads.iter().enumerate().filter(|(_, grad)| grad.is_some()) {
            state.present[self.number(unit, param)] = true;
        }
        let total = grads.iter().flatten().map(bytes).sum();
        let shard = Tensor::zeros(built.layout.shard_len, built.shard_dtype(), built.device())?;
        self.gradients.add(bytes(&shard));
        state.given_out += bytes(&shard);
        let mut parts = Vec::with_capacity(built.layout.parts.len());
        for part in &built.layout.parts {
            let whole = flat(built, part, &grads, self.reduce_dtype(built))?;
            parts.push(self.start_reduce_part(built, part, whole, &shard)?);
        }
        Ok(PendingReduction { unit, shard, parts, bytes: total, last: None })
    }

    fn start_reduce_part(
        &self,
        built: &BuiltUnit,
        part: &Part,
        whole: Tensor,
        shard: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Work>)> {
        let Some(comm) = &self.groups.shard else { return Ok((Some(whole), None)) };
        if part.len == 0 {
            return Ok((None, None));
        }
        let kept = part.range(comm.rank()).len();
        let counts = part.counts(built.layout.ranks);
        let (output, own) = match whole.dtype() == shard.dtype() {
            true => (shard.narrow(0, part.offset, kept)?, None),
            false => {
                let own = Tensor::zeros(kept, whole.dtype(), whole.device())?;
                (own.clone(), Some(own))
            }
        };
        let operation = Operation::ReduceScatter { output, input: whole, op: ReduceOp::Avg, counts };
        Ok((own, Some(comm.submit(operation)?)))
    }

    /// Waits for the operations in progress, and copies their results into the shards.
    fn finish_reductions(&self, state: &mut State) -> Result<()> {
        for reduction in state.pending.iter_mut().filter(|reduction| reduction.last.is_none()) {
            let built = &self.units[reduction.unit];
            for (part, (own, work)) in built.layout.parts.iter().zip(reduction.parts.drain(..)) {
                work.map_or(Ok(()), Work::wait)?;
                if let Some(own) = own.filter(|own| own.elem_count() > 0) {
                    reduction.shard.slice_set(&own.to_dtype(reduction.shard.dtype())?, 0, part.offset)?;
                }
            }
            self.gradients.sub(std::mem::take(&mut reduction.bytes));
            if let Some(same_shard) = &self.groups.same_shard {
                reduction.last = Some(start_averages(same_shard, built, &reduction.shard)?);
            }
        }
        Ok(())
    }

    /// Averages the remaining gradients, waits for all, and returns the gradients of the shards, by unit.
    pub(super) fn finish(&self, state: &mut State) -> Result<Vec<(usize, Tensor)>> {
        (0..self.units.len()).try_for_each(|unit| self.reduce(state, unit))?;
        self.finish_reductions(state)?;
        let mut shards: Vec<(usize, Tensor)> = Vec::with_capacity(state.pending.len());
        for PendingReduction { unit, shard, last, .. } in state.pending.drain(..) {
            last.into_iter().flatten().try_for_each(Work::wait)?;
            match shards.iter_mut().find(|(known, _)| *known == unit) {
                Some((_, sum)) => {
                    self.gradients.sub(bytes(&shard));
                    state.given_out -= bytes(&shard);
                    *sum = (&*sum + shard)?;
                }
                None => shards.push((unit, shard)),
            }
        }
        Ok(shards)
    }
}

/// Starts to average a shard, each range of it over the ranks that hold the same.
fn start_averages(same_shard: &ParameterGroups, built: &BuiltUnit, shard: &Tensor) -> Result<Vec<Work>> {
    let mut works = Vec::new();
    for (group, comm) in same_shard.groups().enumerate() {
        let own = built.layout.of_group(group);
        if !own.is_empty() && comm.world_size() > 1 {
            let tensor = shard.narrow(0, own.start, own.len())?;
            works.push(comm.submit(Operation::AllReduce { tensor, op: ReduceOp::Avg })?);
        }
    }
    Ok(works)
}

/// Returns a part's gradient as one flat tensor; zeros for parameters without a gradient.
fn flat(built: &BuiltUnit, part: &Part, grads: &[Option<Tensor>], dtype: DType) -> Result<Tensor> {
    let one = |param: usize| match &grads[param] {
        Some(grad) => Ok(grad.to_dtype(dtype)?.contiguous()?.flatten_all()?),
        None => storage::zero_tensor(dtype, built.params[param].tensor.elem_count(), built.device()),
    };
    let all: Vec<Tensor> = part
        .slots
        .iter()
        .filter(|slot| slot.len > 0)
        .map(|slot| one(slot.param))
        .collect::<candle_core::Result<_>>()?;
    Ok(match &all[..] {
        [] => storage::zero_tensor(dtype, 0, built.device())?,
        [one] => one.clone(),
        several => Tensor::cat(several, 0)?,
    })
}

/// Dtype in which gradients are summed before they are rounded to `reduced`: in a sum of 16 bits, many small ones would be
/// lost.
fn sum_dtype(computed: DType, reduced: DType) -> DType {
    if [computed, reduced].contains(&DType::F64) { DType::F64 } else { DType::F32 }
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}
