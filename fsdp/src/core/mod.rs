//! Runtime of a sharded model: gathers and releases parameters, and reduces gradients to shards.

mod compare;
mod gather;
mod graph;
mod reduce;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::Work;
use comm::internal::Digest;
use training::internal::{BackwardOwner, backward_of, backward_owner};

use crate::built::{BuiltUnit, Model, Param};
use crate::groups::Groups;
use crate::memory::{Memory, Meter};
use crate::storage::Pool;
use crate::{Error, FsdpConfig, Result, lock};

use graph::{Graph, Runs};
use reduce::PendingReduction;

pub(crate) use graph::Run;

/// One sharded model on this rank.
pub(crate) struct Core {
    pub(crate) groups: Groups,
    pub(crate) config: FsdpConfig,
    pub(crate) units: Vec<BuiltUnit>,
    pub(crate) buffers: Vec<(String, Var)>,
    parameters: Meter,
    gradients: Meter,
    /// Held during a backward: one at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    pool: Pool,
    units: Vec<UnitState>,
    /// Units in the order in which they ran in the previous forward pass; initially in order of construction.
    order: Vec<usize>,
    /// Units that have run in the current forward pass.
    ran: Vec<usize>,
    runs: Runs,
    /// Graph of the loss of the current backward.
    graph: Graph,
    /// By parameter, over all units: whether any rank has a gradient of it, from this backward or accumulated before.
    present: Vec<bool>,
    /// Units whose gradients are being averaged.
    pending: VecDeque<PendingReduction>,
    /// Whether the current backward averages gradients over ranks.
    synchronise: bool,
    /// Whether gradients are accumulated for a later backward, in which case shards have not changed.
    accumulating: bool,
    /// Hash of the communication since ranks last compared it.
    history: Digest,
    /// Bytes of the shard gradients that the last backward returned.
    given_out: usize,
    /// Whether the check for parameters without a gradient is still to be done.
    unaudited: bool,
    failed: Option<Error>,
}

/// State of a unit.
#[derive(Default)]
struct UnitState {
    held: Held,
    /// By parameter: sum of the gradients of this backward, and of earlier ones that did not communicate.
    grads: Vec<Option<Tensor>>,
    /// By parameter: it is in the graph of the loss, and its gradient has not arrived yet.
    awaited: Vec<bool>,
    /// Whether the graph contains all parameters, from a single run that is not recomputed: then nothing follows the last
    /// gradient, which can start the reduction. If a recomputed part could use them as well, only some ranks might have all
    /// of them in their graph, and those would communicate once more than the others.
    all_in_graph: bool,
    /// This backward has gathered it and not yet released it.
    in_use: bool,
    /// Bytes of the copies of its small parameters, and of its gathered parameters of bytes.
    copied: usize,
}

/// Whether a unit's parameters are gathered.
#[derive(Default)]
enum Held {
    #[default]
    Nowhere,
    /// By part: the buffer that it is gathered in, and the all-gather. The operation is `None` where there is no shard group
    /// or the part is empty.
    Coming(Vec<(Tensor, Option<Work>)>),
    Here,
}

impl Core {
    pub(crate) fn new(groups: Groups, config: FsdpConfig, model: Model) -> Self {
        let Model { units, buffers, .. } = model;
        let bytes = |unit: &BuiltUnit| unit.layout.padded_len() * unit.dtype.size_in_bytes();
        let mut largest: Vec<usize> = units.iter().map(bytes).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        let state = State {
            pool: Pool::new(largest.iter().take(2).sum()),
            units: units.iter().map(UnitState::of).collect(),
            order: (0..units.len()).collect(),
            ran: Vec::new(),
            runs: Runs::default(),
            graph: Graph::default(),
            present: vec![false; units.iter().map(|unit| unit.params.len()).sum()],
            pending: VecDeque::new(),
            synchronise: false,
            accumulating: false,
            history: Digest::new(),
            given_out: 0,
            unaudited: true,
            failed: None,
        };
        let parameters = Meter::default();
        parameters.add(units.iter().map(BuiltUnit::shard_bytes).sum());
        let (turn, state) = (Mutex::default(), Mutex::new(state));
        Self { groups, config, units, buffers, parameters, gradients: Meter::default(), turn, state }
    }

    pub(crate) fn memory(&self) -> Memory {
        Memory { parameters: self.parameters.bytes(), gradients: self.gradients.bytes() }
    }

    /// Returns the parameters of all units, in order of construction.
    pub(crate) fn params(&self) -> impl Iterator<Item = &Param> {
        self.units.iter().flat_map(|unit| &unit.params)
    }

    /// Returns the first failure of an earlier call.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.state).check()
    }

    /// Starts a forward pass: gathered parameters are released, because the shards may have changed, unless gradients are being
    /// accumulated.
    pub(crate) fn begin_forward(&self) -> Result<()> {
        if self.is_in_backward() {
            // A recomputation: the shards have not changed.
            return self.check();
        }
        let _turn = lock(&self.turn);
        let state = &mut *lock(&self.state);
        state.check()?;
        state.next_pass();
        let kept = if state.accumulating { Ok(()) } else { self.release_all(state) };
        kept.map_err(|error| state.fail(error))
    }

    /// Runs `look` on the shards, outside of a forward or backward pass.
    pub(crate) fn between_passes<T>(&self, look: impl FnOnce() -> Result<T>) -> Result<T> {
        self.begin_forward()?;
        let _turn = lock(&self.turn);
        look()
    }

    /// Runs `change`, which replaces the shards. Gathered parameters and accumulated gradients belong to the old ones and are
    /// dropped.
    pub(crate) fn replace_shards<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check()?;
        {
            let _turn = lock(&self.turn);
            self.forget_gradients(&mut lock(&self.state));
        }
        self.between_passes(change)
    }

    /// Runs backward. With `synchronise`, the result contains the gradients of the shards, averaged over ranks.
    pub(crate) fn backward(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        let _turn = lock(&self.turn);
        self.check()?;
        let fail = |error| lock(&self.state).fail(error);
        let panicked = || drop(fail(Error::Panicked));
        backward_of(self, || self.pass(loss, synchronise), panicked).map_err(fail)
    }

    fn pass(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        self.prepare_backward(loss, synchronise);
        let backward = tracing::info_span!("backward").in_scope(|| ops::backward(loss));
        let mut grads = backward.map_err(Error::during("backward"))?;
        let state = &mut *lock(&self.state);
        let shards = tracing::info_span!("wait").in_scope(|| self.finish(state))?;
        state.accumulating = !synchronise;
        state.next_pass();
        for unit in 0..self.units.len() {
            if synchronise || !self.units[unit].keep {
                self.release(state, unit)?;
            }
        }
        if synchronise {
            self.compare(state)?;
            self.audit(state)?;
        }
        for (unit, pieces) in shards {
            for (param, Param { shard, .. }) in self.units[unit].params.iter().enumerate() {
                if state.present[self.number(unit, param)] {
                    grads.insert(shard, self.units[unit].of_param(&pieces, param)?);
                }
            }
        }
        Ok(grads)
    }

    /// Returns a parameter's index over all units.
    fn number(&self, unit: usize, param: usize) -> usize {
        self.units[..unit].iter().map(|unit| unit.params.len()).sum::<usize>() + param
    }

    /// Determines which gradients backward from `loss` will produce.
    fn prepare_backward(&self, loss: &Tensor, synchronise: bool) {
        let state = &mut *lock(&self.state);
        self.gradients.sub(std::mem::take(&mut state.given_out));
        state.synchronise = synchronise;
        state.present.fill(false);
        let params = self.units.iter().map(|unit| unit.params.iter().map(|param| &param.tensor));
        state.graph = Graph::new(loss, params, &state.runs);
        for (index, (unit, built)) in state.units.iter_mut().zip(&self.units).enumerate() {
            unit.awaited = built.params.iter().map(|param| state.graph.contains(&param.tensor)).collect();
            unit.all_in_graph = !unit.awaited.contains(&false) && state.graph.has_one_run(index);
            unit.in_use = false;
        }
    }

    /// Called when backward reaches an output of a unit's run.
    pub(crate) fn enter_backward(&self, run: &Run, output: &Tensor) -> Result<()> {
        let owner = backward_owner(self);
        if owner == BackwardOwner::Nobody {
            return Err(Error::OutsideBackward { unit: self.units[run.unit].name.clone() });
        }
        let state = &mut *lock(&self.state);
        if owner == BackwardOwner::Another {
            // The loss of another model depends on this model.
            return self.gather(state, run.unit);
        }
        state.graph.advance_to(output.id());
        self.release_passed_units(state)?;
        self.gather(state, run.unit)?;
        state.units[run.unit].in_use = true;
        state.graph.after(run).map_or(Ok(()), |next| self.begin_gather(state, next))
    }

    /// Releases the units that this backward has passed, and starts to average their gradients.
    fn release_passed_units(&self, state: &mut State) -> Result<()> {
        for unit in 0..self.units.len() {
            let is_needed = || state.graph.needs(unit) || state.runs.is_recomputed(unit);
            if !state.units[unit].in_use || is_needed() {
                continue;
            }
            state.units[unit].in_use = false;
            if state.synchronise || !self.units[unit].keep {
                self.release(state, unit)?;
            }
            self.reduce(state, unit)?;
        }
        Ok(())
    }

    /// Returns true on the thread that runs this model's backward.
    fn is_in_backward(&self) -> bool {
        backward_owner(self) == BackwardOwner::This
    }

    /// Called before a unit runs.
    pub(crate) fn enter_forward(&self, unit: usize) -> Result<Arc<Run>> {
        let state = &mut *lock(&self.state);
        state.check()?;
        let gathered = match self.is_in_backward() {
            true => self.gather_for_recomputation(state, unit),
            false => self.gather_and_prefetch(state, unit),
        };
        gathered.map_err(|error| state.fail(error))?;
        let run = state.runs.begin(unit, self.is_in_backward())?;
        ops::runs_in_part(&(Arc::clone(&run) as Arc<dyn ops::PartMember>));
        Ok(run)
    }

    /// Gathers a unit for a recomputation, in which it stays gathered.
    fn gather_for_recomputation(&self, state: &mut State, unit: usize) -> Result<()> {
        if let Some(node) = ops::recomputed_node() {
            state.graph.advance_to(node);
        }
        self.release_passed_units(state)?;
        self.gather(state, unit)?;
        state.units[unit].in_use = true;
        Ok(())
    }

    /// Gathers a unit, and starts to gather the one that ran after it in the previous pass.
    fn gather_and_prefetch(&self, state: &mut State, unit: usize) -> Result<()> {
        let place = state.ran.len();
        state.ran.push(unit);
        let next = state.order.get(place + 1).copied().filter(|_| state.order.get(place) == Some(&unit));
        self.gather(state, unit)?;
        next.map_or(Ok(()), |next| self.begin_gather(state, next))
    }

    /// Called after a unit has run.
    pub(crate) fn leave_forward(&self, run: &Run) {
        if self.units[run.unit].keep || run.in_backward {
            return;
        }
        let state = &mut *lock(&self.state);
        if let Err(error) = self.release(state, run.unit) {
            state.fail(error);
        }
    }
}

impl UnitState {
    fn of(unit: &BuiltUnit) -> Self {
        Self { grads: vec![None; unit.params.len()], ..Self::default() }
    }
}

impl State {
    fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn fail(&mut self, error: Error) -> Error {
        self.failed.get_or_insert(error).clone()
    }

    fn next_pass(&mut self) {
        if !self.ran.is_empty() {
            self.order = std::mem::take(&mut self.ran);
        }
    }

    /// Adds a communication to the history hash.
    fn record_communication(&mut self, what: u8, unit: usize) {
        self.history = self.history.word(what).word(unit as u64);
    }
}
