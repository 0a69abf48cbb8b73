//! A unit's gradients: averaged over ranks, of which each keeps its part.

use candle_core::{DType, Tensor};
use comm::{Operation, ReduceOp, Work};

use super::{Core, PASS, State, UnitState};
use crate::builder::Built;
use crate::hook::Place;
use crate::layout::Part;
use crate::{Error, Result, lock, storage};

/// A unit whose gradients are being averaged.
pub(super) struct Flight {
    unit: usize,
    /// The gradient of this rank's shard, once all is done.
    shard: Tensor,
    /// By part: this rank's piece, where that does not come into `shard` by itself; and the operation.
    parts: Vec<(Option<Tensor>, Option<Work>)>,
    /// Bytes of whole gradients, which are free once the parts have come.
    bytes: usize,
    /// The average over replicas, the last that is to be done.
    last: Option<Work>,
}

impl Core {
    /// Takes in a gradient; called by its hook during backward.
    pub(crate) fn receive(&self, place: Place, grad: &Tensor) -> Result<()> {
        let built = &self.units[place.unit];
        match PASS.get() {
            None => return Err(Error::OutsideBackward { unit: built.name.clone() }),
            // Another model's loss goes through this model: its gradients are not asked for.
            Some(core) if core != self.address() => return Ok(()),
            Some(_) => {}
        }
        let grad = grad.to_dtype(self.reduce_dtype(built))?;
        let state = &mut *lock(&self.state);
        self.gradients.add(bytes(&grad));
        let unit = &mut state.units[place.unit];
        unit.grads[place.param] = Some(grad);
        unit.awaited = unit.awaited.saturating_sub(1);
        if unit.awaited == 0 { self.complete(state, place.unit) } else { Ok(()) }
    }

    fn reduce_dtype(&self, built: &Built) -> DType {
        self.config.mixed_precision.reduce_dtype.unwrap_or(built.dtype)
    }

    /// All gradients of a unit have come.
    fn complete(&self, state: &mut State, unit: usize) -> Result<()> {
        if !state.synchronise {
            if !self.units[unit].keep {
                self.release(state, unit)?;
            }
            return self.sum_up(state, unit);
        }
        self.release(state, unit)?;
        self.sum_up(state, unit)?;
        let flight = self.launch(state, unit)?;
        // Two units' whole gradients at a time: that of this one, and that of the one which is computed next.
        self.land_all(state)?;
        state.flights.push_back(flight);
        if self.groups.shard.is_none() {
            self.land_all(state)?;
        }
        Ok(())
    }

    /// Adds this backward's gradients to those of backwards that did not communicate.
    fn sum_up(&self, state: &mut State, unit: usize) -> Result<()> {
        let unit = &mut state.units[unit];
        for (sum, grad) in unit.sums.iter_mut().zip(&mut unit.grads) {
            let Some(grad) = grad.take() else { continue };
            *sum = Some(match sum.take() {
                Some(sum) => {
                    self.gradients.sub(bytes(&grad));
                    (sum + grad)?
                }
                None => grad,
            });
        }
        Ok(())
    }

    /// Gradients of backwards that did not communicate will not be averaged.
    pub(super) fn forget_gradients(&self, state: &mut State) {
        state.accumulating = false;
        for unit in &mut state.units {
            let all = unit.sums.iter_mut().chain(&mut unit.grads);
            all.filter_map(Option::take).for_each(|gradient| self.gradients.sub(bytes(&gradient)));
        }
    }

    fn launch(&self, state: &mut State, unit: usize) -> Result<Flight> {
        state.note(1, unit);
        let built = &self.units[unit];
        let span = tracing::info_span!("reduce", unit = built.name);
        let _entered = span.enter();
        let grads = std::mem::replace(&mut state.units[unit].sums, vec![None; built.params.len()]);
        let total = grads.iter().flatten().map(bytes).sum();
        let shard = Tensor::zeros(built.layout.shard_len, built.shard.dtype(), built.shard.device())?;
        self.gradients.add(built.shard_bytes());
        state.given_out += built.shard_bytes();
        let mut parts = Vec::with_capacity(built.layout.parts.len());
        for part in &built.layout.parts {
            let whole = flat(built, part, &grads, self.reduce_dtype(built))?;
            parts.push(self.launch_part(built, part, whole, &shard)?);
        }
        Ok(Flight { unit, shard, parts, bytes: total, last: None })
    }

    fn launch_part(
        &self,
        built: &Built,
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

    /// Brings what is under way into the shards.
    fn land_all(&self, state: &mut State) -> Result<()> {
        for flight in state.flights.iter_mut().filter(|flight| flight.last.is_none()) {
            let built = &self.units[flight.unit];
            for (part, (own, work)) in built.layout.parts.iter().zip(flight.parts.drain(..)) {
                work.map_or(Ok(()), Work::wait)?;
                if let Some(own) = own.filter(|own| own.elem_count() > 0) {
                    flight.shard.slice_set(&own.to_dtype(flight.shard.dtype())?, 0, part.offset)?;
                }
            }
            self.gradients.sub(std::mem::take(&mut flight.bytes));
            if let Some(replicas) = &self.groups.replicate {
                let (tensor, op) = (flight.shard.clone(), ReduceOp::Avg);
                flight.last = Some(replicas.submit(Operation::AllReduce { tensor, op })?);
            }
        }
        Ok(())
    }

    /// Averages what is left, and waits for all; the gradients of the shards.
    pub(super) fn finish(&self, state: &mut State) -> Result<Vec<(usize, Tensor)>> {
        for unit in 0..self.units.len() {
            let UnitState { grads, sums, .. } = &state.units[unit];
            let waits = state.synchronise && sums.iter().any(Option::is_some);
            if waits || grads.iter().any(Option::is_some) {
                self.complete(state, unit)?;
            }
        }
        self.land_all(state)?;
        let mut shards = Vec::with_capacity(state.flights.len());
        for flight in state.flights.drain(..) {
            flight.last.map_or(Ok(()), Work::wait)?;
            shards.push((flight.unit, flight.shard));
        }
        Ok(shards)
    }
}

/// A part's gradient as one tensor; zeros for parameters that got none.
fn flat(built: &Built, part: &Part, grads: &[Option<Tensor>], dtype: DType) -> Result<Tensor> {
    let one = |param: usize| match &grads[param] {
        Some(grad) => Ok(grad.contiguous()?.flatten_all()?),
        None => storage::zero_tensor(dtype, built.params[param].tensor.elem_count(), built.shard.device()),
    };
    let all: Vec<Tensor> = part
        .slots
        .iter()
        .filter(|slot| slot.len > 0)
        .map(|slot| one(slot.param))
        .collect::<candle_core::Result<_>>()?;
    Ok(match &all[..] {
        [] => storage::zero_tensor(dtype, 0, built.shard.device())?,
        [one] => one.clone(),
        several => Tensor::cat(several, 0)?,
    })
}

fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}
