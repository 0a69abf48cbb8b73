//! One backward pass: hooks bring gradients, full buckets go out, averages come back.

mod flight;
mod late;
mod rebuild;

use std::cell::Cell;
use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::Communicator;

use crate::buckets::{Buckets, Gradient};
use crate::comm_hook::BucketHook;
use crate::parameter::{Kinds, Parameter};
use crate::plan::{self, Item, Plan};
use crate::search::Search;
use crate::weights::Weights;
use crate::{DdpConfig, Error, Result, lock};

use flight::Flight;

thread_local! {
    /// The address of the reducer whose backward this thread is in.
    static PASS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Averages the gradients of one model over the ranks of one group.
pub(crate) struct Reducer {
    comm: Arc<dyn Communicator>,
    gradients: Vec<Gradient>,
    items: Vec<Item>,
    config: DdpConfig,
    hook: Arc<dyn BucketHook>,
    /// What is to be made equal after each step.
    buffers: Vec<Tensor>,
    /// One backward at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    buckets: Buckets,
    weights: Weights,
    /// What this pass's gradients are multiplied with; none where they do not count.
    scale: Option<f64>,
    /// This pass communicates.
    synchronise: bool,
    /// The next bucket to go out in this pass.
    next: usize,
    /// Those that are under way.
    flights: VecDeque<Flight>,
    /// The buckets follow the order in which gradients came on rank 0.
    rebuilt: bool,
    /// Sizes are being tried.
    search: Option<Search>,
    bucket_bytes: usize,
    /// The pass before had parameters without gradient: see which they are before the next, since they hold up a bucket.
    look_ahead: bool,
    /// By parameter, in the first pass: what came after its bucket had gone.
    late: Vec<Option<Tensor>>,
    /// The parameters whose gradients came in the pass before.
    came_before: Vec<usize>,
    /// Parameters without a gradient are still to be looked for.
    unaudited: bool,
    failed: Option<Error>,
}

impl Reducer {
    pub(crate) fn new(
        comm: Arc<dyn Communicator>,
        parameters: &[Parameter],
        buffers: &[(String, Var)],
        config: &DdpConfig,
    ) -> Self {
        let mut kinds = Kinds::default();
        let items: Vec<Item> = parameters.iter().map(|parameter| kinds.item(parameter.tensor())).collect();
        let order = plan::complete([], items.len());
        let plan = Plan::new(&items, &order, config.first_bucket_bytes, config.bucket_bytes);
        let state = State {
            buckets: Buckets::new(plan),
            weights: Weights::default(),
            scale: Some(1.0),
            synchronise: false,
            next: 0,
            flights: VecDeque::new(),
            rebuilt: false,
            search: None,
            bucket_bytes: config.bucket_bytes,
            look_ahead: false,
            late: vec![None; items.len()],
            came_before: Vec::new(),
            unaudited: true,
            failed: None,
        };
        let hook = config.hook.start(comm.world_size());
        Self {
            comm,
            gradients: parameters.iter().map(Gradient::of).collect(),
            items,
            config: config.clone(),
            hook,
            buffers: match config.broadcast_buffers {
                true => buffers.iter().map(|(_, buffer)| buffer.as_tensor().clone()).collect(),
                false => Vec::new(),
            },
            turn: Mutex::default(),
            state: Mutex::new(state),
        }
    }

    pub(crate) fn comm(&self) -> &dyn Communicator {
        &*self.comm
    }

    /// Compares the parameters of all ranks, while no backward is under way.
    pub(crate) fn check_parameters(&self, parameters: &[Parameter]) -> Result<()> {
        let _turn = lock(&self.turn);
        self.check()?;
        let tensors: Vec<_> =
            parameters.iter().map(|parameter| (parameter.name(), parameter.var().as_tensor())).collect();
        match comm::parameter_difference(&*self.comm, &tensors)? {
            Some(difference) => Err(Box::new(difference).into()),
            None => Ok(()),
        }
    }

    /// The first cause, where an earlier call failed.
    pub(crate) fn check(&self) -> Result<()> {
        match &lock(&self.state).failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Runs backward; the gradients go to the buckets. With `synchronise`, their averages come back in the result: means
    /// over ranks, or where there is a weight, over all that is weighed.
    pub(crate) fn backward(
        &self,
        loss: &Tensor,
        weight: Option<f64>,
        synchronise: bool,
    ) -> Result<GradStore> {
        let _turn = lock(&self.turn);
        self.check()?;
        {
            let state = &mut *lock(&self.state);
            // A mistake here has not changed anything yet.
            state.scale = state.weights.add(weight)?;
        }
        let pass = Pass { reducer: self, before: PASS.replace(Some(self.address())) };
        let result = self.pass(loss, synchronise).map_err(|error| self.fail(error));
        drop(pass);
        result
    }

    /// Takes part in a step of the others, for which this rank has no loss; none where no rank has one.
    pub(crate) fn join(&self) -> Result<Option<GradStore>> {
        let _turn = lock(&self.turn);
        self.check()?;
        lock(&self.state).weights.check_weighted()?;
        self.join_pass().map_err(|error| self.fail(error))
    }

    /// Takes in a gradient; called by its hook during backward.
    pub(crate) fn receive(&self, index: usize, grad: &Tensor) -> Result<()> {
        match PASS.get() {
            None => Err(Error::OutsideBackward { parameter: self.gradients[index].name.clone() }),
            // Another model's loss goes through this model: its gradients are not asked for.
            Some(reducer) if reducer != self.address() => Ok(()),
            Some(_) => {
                let state = &mut *lock(&self.state);
                state.buckets.arrive(index);
                if state.buckets.plan.places[index].bucket < state.next {
                    return self.receive_late(state, index, grad);
                }
                let put = state.buckets.put(&self.gradients, index, grad, state.scale);
                put.map_err(Error::during("gathering gradients"))?;
                self.launch_complete(state)
            }
        }
    }

    fn pass(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        let began = Instant::now();
        self.begin(synchronise)?;
        if synchronise {
            self.foresee(loss)?;
        }
        let backward = tracing::info_span!("backward").in_scope(|| training::backward(loss));
        let mut grads = backward.map_err(Error::during("backward"))?;
        if synchronise {
            self.wait()?;
            let time = began.elapsed();
            self.give_out(&mut grads)?;
            self.rebuild(Some(time))?;
        } else if let Some(gradient) = self.gradients.iter().find(|g| grads.get_id(g.variable).is_some()) {
            return Err(Error::DirectUse { parameter: gradient.name.clone() });
        }
        Ok(grads)
    }

    fn join_pass(&self) -> Result<Option<GradStore>> {
        self.begin(true)?;
        {
            let mut state = lock(&self.state);
            if state.weights.all_joined()? {
                state.weights.clear();
                return Ok(None);
            }
        }
        let mut grads = tape::empty()?;
        self.wait()?;
        self.give_out(&mut grads)?;
        self.rebuild(None)?;
        Ok(Some(grads))
    }

    fn begin(&self, synchronise: bool) -> Result<()> {
        let mut state = lock(&self.state);
        state.buckets.begin_pass();
        state.synchronise = synchronise;
        state.next = 0;
        if synchronise { state.weights.exchange(&*self.comm) } else { Ok(()) }
    }

    /// Does not wait for gradients that `loss` will not give.
    fn foresee(&self, loss: &Tensor) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.look_ahead {
            return Ok(());
        }
        let nodes: HashSet<_> = loss.sorted_nodes().iter().map(|node| node.id()).collect();
        let unseen = |index: &usize| !nodes.contains(&self.gradients[*index].hooked);
        // What backward computes again is not in the graph. Where one of those that came before is not there, others may come, too.
        if state.came_before.iter().any(unseen) {
            return Ok(());
        }
        (0..self.gradients.len()).filter(unseen).for_each(|index| state.buckets.settle(index));
        self.launch_complete(&mut state)
    }

    fn give_out(&self, grads: &mut GradStore) -> Result<()> {
        let mut state = lock(&self.state);
        state.look_ahead = state.buckets.arrived.len() < self.gradients.len();
        state.came_before = state.buckets.arrived.clone();
        let averaged = self.comm.world_size() > 1;
        let factor = state.weights.factor()?;
        let audits = state.unaudited && state.weights.any_counts()?;
        state.weights.clear();
        for bucket in 0..state.buckets.plan.buckets.len() {
            if !averaged {
                state.buckets.scale(bucket, factor)?;
            }
            let taken = state.buckets.take(&self.gradients, bucket, averaged);
            for (index, grad) in taken.map_err(Error::during("giving out gradients"))? {
                let Gradient { name, variable, .. } = &self.gradients[index];
                if grads.get_id(*variable).is_some() {
                    return Err(Error::DirectUse { parameter: name.clone() });
                }
                grad.map(|grad| grads.insert_id(*variable, grad));
            }
        }
        if audits {
            state.unaudited = false;
            self.audit(grads)?;
        }
        Ok(())
    }

    /// All ranks have the same gradients, so that all come to the same end.
    fn audit(&self, grads: &GradStore) -> Result<()> {
        let parameters = self.gradients.iter().map(|gradient| {
            (gradient.name.as_str(), gradient.shape.dims(), grads.get_id(gradient.variable).is_some())
        });
        Ok(self.config.audit.act("Ddp", self.comm.rank() == 0, parameters)?)
    }

    /// The size of buckets that is in use.
    pub(crate) fn bucket_bytes(&self) -> usize {
        lock(&self.state).bucket_bytes
    }

    fn fail(&self, error: Error) -> Error {
        lock(&self.state).failed.get_or_insert(error).clone()
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// While it lives, hooks on this thread bring their gradients to `reducer`.
struct Pass<'a> {
    reducer: &'a Reducer,
    before: Option<usize>,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        PASS.set(self.before);
        if std::thread::panicking() {
            self.reducer.fail(Error::Panicked);
        }
    }
}
