//! The reducer, which runs a backward pass: hooks deliver gradients, full buckets are averaged, and the averages are
//! returned.

mod late;
mod pending_bucket;
mod rebuild;

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use comm::Communicator;
use strategy::{ParameterGroups, Replicas, check_replicas};
use training::internal::{BackwardOwner, backward_of, backward_owner};

use crate::bucket_plan::{self, Item, Plan};
use crate::buckets::{Buckets, Gradient};
use crate::comm_hook::BucketHook;
use crate::parameter::{Kinds, Parameter};
use crate::search::Search;
use crate::weights::Weights;
use crate::{DdpConfig, Error, Result, lock};

use pending_bucket::PendingBucket;

/// Averages the gradients of one model, each over the ranks that have replicas of the parameter.
pub(crate) struct Reducer {
    averaged_over: ParameterGroups,
    gradients: Vec<Gradient>,
    items: Vec<Item>,
    config: DdpConfig,
    hook: Arc<dyn BucketHook>,
    /// The model's buffers that are broadcast after each step.
    buffers: Vec<Tensor>,
    /// Held during a backward: one at a time.
    turn: Mutex<()>,
    state: Mutex<State>,
}

struct State {
    buckets: Buckets,
    weights: Weights,
    /// Factor for the gradients of this pass; `None`: they are ignored.
    scale: Option<f64>,
    /// Whether this pass communicates.
    synchronise: bool,
    /// Index of the next bucket to be sent in this pass.
    next: usize,
    /// Buckets that are being averaged.
    pending: VecDeque<PendingBucket>,
    /// Whether the buckets follow the order in which gradients arrived on rank 0.
    rebuilt: bool,
    /// The bucket size search, while it is in progress.
    search: Option<Search>,
    bucket_bytes: usize,
    /// The previous pass had parameters without a gradient: such parameters are determined before the next pass, since a
    /// bucket would wait for them.
    look_ahead: bool,
    /// By parameter, in the first pass: gradients that arrived after their bucket had been sent.
    late: Vec<Option<Tensor>>,
    /// Parameters whose gradients arrived in the previous pass.
    came_before: Vec<usize>,
    /// Whether the check for parameters without a gradient is still to be done.
    unaudited: bool,
    failed: Option<Error>,
}

impl Reducer {
    pub(crate) fn new(
        averaged_over: ParameterGroups,
        parameters: &[Parameter],
        buffers: &[(String, Var)],
        config: &DdpConfig,
    ) -> Self {
        let mut kinds = Kinds::default();
        let item =
            |parameter: &Parameter| kinds.item(parameter.tensor(), averaged_over.index_of(parameter.name()));
        let items: Vec<Item> = parameters.iter().map(item).collect();
        let ranks = averaged_over.all().world_size();
        let order = bucket_plan::complete([], items.len());
        let plan = Plan::new(&items, &order, config.first_bytes(), config.bucket_bytes);
        let state = State {
            buckets: Buckets::new(plan, ranks == 1),
            weights: Weights::default(),
            scale: Some(1.0),
            synchronise: false,
            next: 0,
            pending: VecDeque::new(),
            rebuilt: false,
            search: None,
            bucket_bytes: config.bucket_bytes,
            look_ahead: false,
            late: vec![None; items.len()],
            came_before: Vec::new(),
            unaudited: true,
            failed: None,
        };
        let hook = config.hook.start(ranks);
        Self {
            averaged_over,
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

    /// The group of all ranks.
    pub(crate) fn comm(&self) -> &dyn Communicator {
        &**self.averaged_over.all()
    }

    pub(crate) fn averaged_over(&self) -> &ParameterGroups {
        &self.averaged_over
    }

    /// Whether there is one bucket at most, on all ranks: of several groups, other ranks may have parameters of more.
    fn has_one_bucket(&self, state: &State) -> bool {
        self.averaged_over.groups().count() == 1 && state.buckets.plan.buckets.len() < 2
    }

    /// The parameters of each group.
    fn groups(&self) -> impl Iterator<Item = (&Arc<dyn Communicator>, Vec<usize>)> {
        self.averaged_over.groups().enumerate().map(move |(group, comm)| {
            let of = (0..self.items.len()).filter(move |index| self.items[*index].group == group);
            (comm, of.collect())
        })
    }

    /// Compares the parameters of all ranks, while no backward is in progress.
    pub(crate) fn check_parameters(&self, parameters: &[Parameter]) -> Result<()> {
        let _turn = lock(&self.turn);
        self.check()?;
        let of = |index: usize| (parameters[index].name(), parameters[index].var().as_tensor());
        let held = self.groups().map(|(comm, indices)| Replicas {
            among: Some(&**comm),
            tensors: indices.into_iter().map(of).collect(),
        });
        let held: Vec<_> = held.collect();
        let all = if held.len() > 1 { vec![self.comm()] } else { Vec::new() };
        Ok(check_replicas(&all, &held)?)
    }

    /// Returns the first failure of an earlier call.
    pub(crate) fn check(&self) -> Result<()> {
        match &lock(&self.state).failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    /// Runs backward and collects the gradients in the buckets. With `synchronise`, the result contains their averages: over
    /// ranks or, with weights, over all samples.
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
            // An error here has not changed anything yet.
            state.scale = state.weights.add(weight)?;
        }
        let panicked = || drop(self.fail(Error::Panicked));
        backward_of(self, || self.pass(loss, synchronise), panicked).map_err(|error| self.fail(error))
    }

    /// Takes part in a step of the other ranks, without a loss; returns `None` if no rank has one.
    pub(crate) fn join(&self) -> Result<Option<GradStore>> {
        let _turn = lock(&self.turn);
        self.check()?;
        lock(&self.state).weights.check_weighted()?;
        self.join_pass().map_err(|error| self.fail(error))
    }

    /// Receives a gradient; called by the parameter's hook during backward.
    pub(crate) fn receive(&self, index: usize, grad: &Tensor) -> Result<()> {
        match backward_owner(self) {
            BackwardOwner::Nobody => {
                Err(Error::OutsideBackward { parameter: self.gradients[index].name.clone() })
            }
            // The loss of another model depends on this model; this model's gradients are not wanted.
            BackwardOwner::Another => Ok(()),
            BackwardOwner::This => {
                let state = &mut *lock(&self.state);
                state.buckets.arrive(index);
                if state.buckets.plan.places[index].bucket < state.next {
                    return self.receive_late(state, index, grad);
                }
                let put = state.buckets.put(&self.gradients, index, grad, state.scale);
                put.map_err(Error::during("gathering gradients"))?;
                self.start_complete(state)
            }
        }
    }

    fn pass(&self, loss: &Tensor, synchronise: bool) -> Result<GradStore> {
        let began = Instant::now();
        self.begin(synchronise)?;
        if synchronise {
            self.skip_unused_parameters(loss)?;
        }
        let backward = tracing::info_span!("backward").in_scope(|| ops::backward(loss));
        let mut grads = backward.map_err(Error::during("backward"))?;
        if synchronise {
            self.wait()?;
            let time = began.elapsed();
            self.return_gradients(&mut grads)?;
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
        let mut grads = ops::tape::empty()?;
        self.wait()?;
        self.return_gradients(&mut grads)?;
        self.rebuild(None)?;
        Ok(Some(grads))
    }

    fn begin(&self, synchronise: bool) -> Result<()> {
        let mut state = lock(&self.state);
        state.buckets.begin_pass();
        state.synchronise = synchronise;
        state.next = 0;
        if synchronise { state.weights.exchange(self.comm()) } else { Ok(()) }
    }

    /// Marks parameters that `loss` does not depend on, so that no bucket waits for them.
    fn skip_unused_parameters(&self, loss: &Tensor) -> Result<()> {
        let mut state = lock(&self.state);
        if !state.look_ahead {
            return Ok(());
        }
        let nodes: HashSet<_> = loss.sorted_nodes().iter().map(|node| node.id()).collect();
        let unseen = |index: &usize| !nodes.contains(&self.gradients[*index].hooked);
        // The graph does not contain what backward recomputes. If a parameter whose gradient arrived in the previous pass is
        // missing from the graph, others may arrive that way, too.
        if state.came_before.iter().any(unseen) {
            return Ok(());
        }
        (0..self.gradients.len()).filter(unseen).for_each(|index| state.buckets.stop_waiting_for(index));
        self.start_complete(&mut state)
    }

    fn return_gradients(&self, grads: &mut GradStore) -> Result<()> {
        let mut state = lock(&self.state);
        state.look_ahead = state.buckets.arrived.len() < self.gradients.len();
        state.came_before = state.buckets.arrived.clone();
        let factor = state.weights.factor()?;
        let audits = state.unaudited && state.weights.any_counts()?;
        state.weights.clear();
        let taken = state.buckets.take(&self.gradients, factor);
        for (index, grad) in taken.map_err(Error::during("giving out gradients"))? {
            let Gradient { name, variable, .. } = &self.gradients[index];
            if grads.get_id(*variable).is_some() {
                return Err(Error::DirectUse { parameter: name.clone() });
            }
            grad.map(|grad| grads.insert_id(*variable, grad));
        }
        if audits {
            state.unaudited = false;
            self.audit(grads)?;
        }
        Ok(())
    }

    /// Applies [`DdpConfig::audit`]. All ranks have the same gradients, and so get the same result.
    fn audit(&self, grads: &GradStore) -> Result<()> {
        let parameters = self.gradients.iter().map(|gradient| {
            (gradient.name.as_str(), gradient.shape.dims(), grads.get_id(gradient.variable).is_some())
        });
        Ok(self.config.audit.act("Ddp", self.comm().rank() == 0, parameters)?)
    }

    /// Returns the current bucket size in bytes.
    pub(crate) fn bucket_bytes(&self) -> usize {
        lock(&self.state).bucket_bytes
    }

    pub(crate) fn fail(&self, error: Error) -> Error {
        lock(&self.state).failed.get_or_insert(error).clone()
    }
}
