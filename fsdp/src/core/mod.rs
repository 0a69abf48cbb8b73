//! What happens while a model runs: parameters come and go, gradients become shards.

mod gather;
mod reduce;

use std::cell::Cell;
use std::collections::{HashSet, VecDeque};
use std::sync::Mutex;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::Work;

use crate::agreement::{self, Digest};
use crate::builder::{Built, Model};
use crate::groups::Groups;
use crate::memory::{Memory, Meter};
use crate::storage::Pool;
use crate::{Error, FsdpConfig, Result, lock};

use reduce::Flight;

thread_local! {
    /// The address of the core whose backward this thread is in.
    static PASS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// One sharded model on this rank.
pub(crate) struct Core {
    pub(crate) groups: Groups,
    pub(crate) config: FsdpConfig,
    pub(crate) units: Vec<Built>,
    pub(crate) buffers: Vec<(String, Var)>,
    parameters: Meter,
    gradients: Meter,
    /// One backward at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    pool: Pool,
    units: Vec<UnitState>,
    /// Units in the order in which they ran in the forward pass before; at first, that in which they were built.
    order: Vec<usize>,
    /// Those that ran in this one.
    ran: Vec<usize>,
    /// Those that this backward will come to, in the order of their forward runs.
    ahead: Vec<usize>,
    /// Units of which the averages are under way.
    flights: VecDeque<Flight>,
    /// This backward averages.
    synchronise: bool,
    /// Gradients were gathered for a later backward, so that shards have not changed.
    accumulating: bool,
    /// Of what was communicated since ranks last compared it.
    history: Digest,
    /// Bytes of gradients that were given out.
    given_out: usize,
    failed: Option<Error>,
}

/// A unit at this moment.
#[derive(Default)]
struct UnitState {
    held: Held,
    /// By parameter, this backward's gradients.
    grads: Vec<Option<Tensor>>,
    /// By parameter, the sums of backwards that did not communicate.
    sums: Vec<Option<Tensor>>,
    /// Gradients that are still to come.
    awaited: usize,
    /// Its bytes of copies of small parameters.
    copied: usize,
}

/// Where a unit's parameters are.
#[derive(Default)]
enum Held {
    #[default]
    Nowhere,
    /// By part: the buffer they are gathered in, and the operation; none where this rank has all.
    Coming(Vec<(Tensor, Option<Work>)>),
    Here,
}

impl Core {
    pub(crate) fn new(groups: Groups, config: FsdpConfig, model: Model) -> Self {
        let Model { units, buffers, .. } = model;
        let bytes = |unit: &Built| unit.layout.padded_len() * unit.dtype.size_in_bytes();
        let mut largest: Vec<usize> = units.iter().map(bytes).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        let state = State {
            pool: Pool::new(largest.iter().take(2).sum()),
            units: units.iter().map(UnitState::of).collect(),
            order: (0..units.len()).collect(),
            ran: Vec::new(),
            ahead: Vec::new(),
            flights: VecDeque::new(),
            synchronise: false,
            accumulating: false,
            history: Digest::new(),
            given_out: 0,
            failed: None,
        };
        let parameters = Meter::default();
        parameters.add(units.iter().map(Built::shard_bytes).sum());
        let (turn, state) = (Mutex::default(), Mutex::new(state));
        Self { groups, config, units, buffers, parameters, gradients: Meter::default(), turn, state }
    }

    pub(crate) fn memory(&self) -> Memory {
        Memory { parameters: self.parameters.bytes(), gradients: self.gradients.bytes() }
    }

    /// The first cause, where an earlier call failed.
    pub(crate) fn check(&self) -> Result<()> {
        lock(&self.state).check()
    }

    /// A forward pass begins: shards may have changed.
    pub(crate) fn begin_forward(&self) -> Result<()> {
        let _turn = lock(&self.turn);
        let state = &mut *lock(&self.state);
        state.check()?;
        state.next_pass();
        let kept = if state.accumulating { Ok(()) } else { self.release_all(state) };
        kept.map_err(|error| state.fail(error))
    }

    /// Runs `look` on the shards, between forward passes.
    pub(crate) fn exclusively<T>(&self, look: impl FnOnce() -> Result<T>) -> Result<T> {
        self.begin_forward()?;
        let _turn = lock(&self.turn);
        look()
    }

    /// Runs `change` on the shards. What was gathered and accumulated is of the old ones, and forgotten.
    pub(crate) fn replacing<T>(&self, change: impl FnOnce() -> Result<T>) -> Result<T> {
        self.check()?;
        {
            let _turn = lock(&self.turn);
            self.forget_gradients(&mut lock(&self.state));
        }
        self.exclusively(change)
    }

    /// Runs backward. With `synchronise`, the result has the gradients of the shards, averaged over ranks.
    pub(crate) fn backward(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        let _turn = lock(&self.turn);
        self.check()?;
        let pass = Pass { core: self, before: PASS.replace(Some(self.address())) };
        let result = self.pass(loss, synchronise).map_err(|error| lock(&self.state).fail(error));
        drop(pass);
        result
    }

    fn pass(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        self.expect(loss, synchronise)?;
        let backward = tracing::info_span!("backward").in_scope(|| loss.backward());
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
        }
        for (unit, shard) in shards {
            grads.insert(&self.units[unit].shard, shard);
        }
        Ok(grads)
    }

    /// Looks which gradients `loss` will give.
    fn expect(&self, loss: &Tensor, synchronise: bool) -> Result<()> {
        let nodes: HashSet<_> = loss.sorted_nodes().iter().map(|node| node.id()).collect();
        let state = &mut *lock(&self.state);
        self.gradients.sub(std::mem::take(&mut state.given_out));
        state.synchronise = synchronise;
        for (unit, built) in state.units.iter_mut().zip(&self.units) {
            let expected = built.params.iter().filter(|param| nodes.contains(&param.tensor.id()));
            unit.awaited = expected.count();
            unit.grads.fill(None);
        }
        let State { ran, ahead, units, .. } = state;
        ahead.clear();
        ahead.extend(ran.iter().copied().filter(|&unit| units[unit].awaited > 0));
        Ok(())
    }

    /// Backward has come to a unit's output.
    pub(crate) fn enter_backward(&self, unit: usize) -> Result<()> {
        if PASS.get().is_none() {
            return Err(Error::OutsideBackward { unit: self.units[unit].name.clone() });
        }
        let state = &mut *lock(&self.state);
        self.gather(state, unit)?;
        let place = state.ahead.iter().rposition(|&other| other == unit).unwrap_or(0);
        let before = state.ahead[..place].iter().rev().copied().find(|&other| other != unit);
        before.map_or(Ok(()), |before| self.begin_gather(state, before))
    }

    /// A unit is about to run.
    pub(crate) fn enter_forward(&self, unit: usize) -> Result<()> {
        let state = &mut *lock(&self.state);
        state.check()?;
        let place = state.ran.len();
        state.ran.push(unit);
        let next = state.order.get(place + 1).copied().filter(|_| state.order.get(place) == Some(&unit));
        let gathered = self.gather(state, unit).and_then(|()| match next {
            Some(next) => self.begin_gather(state, next),
            None => Ok(()),
        });
        gathered.map_err(|error| state.fail(error))
    }

    /// A unit has run.
    pub(crate) fn leave_forward(&self, unit: usize) {
        if self.units[unit].keep {
            return;
        }
        let state = &mut *lock(&self.state);
        if let Err(error) = self.release(state, unit) {
            state.fail(error);
        }
    }

    /// All ranks must have communicated for the same units in the same order: two of equal size could have been mixed up.
    fn compare(&self, state: &mut State) -> Result<()> {
        let history = std::mem::replace(&mut state.history, Digest::new());
        let world = &*self.groups.world;
        if world.world_size() == 1 {
            return Ok(());
        }
        let own = Tensor::new(&[history.0.cast_signed()], &candle_core::Device::Cpu)?;
        let all = Tensor::zeros(world.world_size(), candle_core::DType::I64, &candle_core::Device::Cpu)?;
        world.run(comm::Operation::AllGather { output: all.clone(), input: own, counts: None })?;
        match agreement::odd_one(&all.to_vec1::<i64>()?) {
            Some((rank, odd_rank)) => {
                let number = |rank: usize| world.world_ranks()[rank];
                Err(Error::OrderMismatch { odd_rank: number(odd_rank), rank: number(rank) })
            }
            None => Ok(()),
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

impl Built {
    fn shard_bytes(&self) -> usize {
        self.shard.elem_count() * self.shard.dtype().size_in_bytes()
    }
}

impl UnitState {
    fn of(unit: &Built) -> Self {
        let none = vec![None; unit.params.len()];
        Self { grads: none.clone(), sums: none, ..Self::default() }
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

    /// Notes what is communicated now.
    fn note(&mut self, what: u8, unit: usize) {
        self.history = self.history.add(what).add(unit as u64);
    }
}

/// While it lives, hooks on this thread belong to the backward of `core`.
struct Pass<'a> {
    core: &'a Core,
    before: Option<usize>,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        PASS.set(self.before);
        if std::thread::panicking() {
            lock(&self.core.state).fail(Error::Panicked);
        }
    }
}
