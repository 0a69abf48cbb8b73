//! Table of applied operations by result: candle's graph does not give access to them.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, Weak};

use rustc_hash::{FxHashMap, FxHashSet};

use crate::lock::lock;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, Result, Tensor, TensorId};

/// Operations by the id of their result, for as long as the result exists.
static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

type Table = FxHashMap<TensorId, Call<Weak<Box1>, Weak<Box2>, Weak<Box3>>>;

pub(crate) type Box1 = Box<dyn CustomOp1 + Send + Sync>;
pub(crate) type Box2 = Box<dyn CustomOp2 + Send + Sync>;
pub(crate) type Box3 = Box<dyn CustomOp3 + Send + Sync>;

/// An operation and its arguments.
#[derive(Clone)]
pub(crate) enum Call<One, Two, Three> {
    One([Tensor; 1], One),
    Two([Tensor; 2], Two),
    Three([Tensor; 3], Three),
    /// A reshape, for which candle shares the storage.
    View([Tensor; 1]),
}

/// A call whose result still exists.
pub(crate) type LiveCall = Call<Arc<Box1>, Arc<Box2>, Arc<Box3>>;

impl LiveCall {
    pub(crate) fn arguments(&self) -> &[Tensor] {
        match self {
            Self::One(arguments, _) => arguments,
            Self::Two(arguments, _) => arguments,
            Self::Three(arguments, _) => arguments,
            Self::View(arguments) => arguments,
        }
    }

    /// Returns the gradients of the arguments, in their order.
    pub(crate) fn backward(&self, result: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        match self {
            Self::One([a], op) => Ok([op.bwd(a, result, gradient)?, None, None]),
            Self::Two([a, b], op) => op.bwd(a, b, result, gradient).map(|(a, b)| [a, b, None]),
            Self::Three([a, b, c], op) => op.bwd(a, b, c, result, gradient).map(<[_; 3]>::from),
            Self::View([a]) => Ok([Some(gradient.reshape(a.shape())?), None, None]),
        }
    }

    fn weak(&self) -> Call<Weak<Box1>, Weak<Box2>, Weak<Box3>> {
        match self.clone() {
            Self::One(arguments, op) => Call::One(arguments, Arc::downgrade(&op)),
            Self::Two(arguments, op) => Call::Two(arguments, Arc::downgrade(&op)),
            Self::Three(arguments, op) => Call::Three(arguments, Arc::downgrade(&op)),
            Self::View(arguments) => Call::View(arguments),
        }
    }
}

/// Owner of a table entry. The operation holds it, and the result holds the operation through candle's graph, so that
/// dropping the result removes the entry.
#[derive(Default)]
pub(crate) struct TableEntry(OnceLock<TensorId>);

impl TableEntry {
    pub(crate) fn insert(&self, result: &Tensor, call: &LiveCall) {
        if self.0.set(result.id()).is_ok() {
            table().insert(result.id(), call.weak());
        }
    }
}

impl Drop for TableEntry {
    fn drop(&mut self) {
        // Arguments are dropped after the table is unlocked, since they may own entries as well.
        let _call = self.0.get().and_then(|result| table().remove(result));
    }
}

/// Returns the call that each of these tensors is the result of, where it is known.
pub(crate) fn known(tensors: &[&Tensor]) -> Vec<Option<LiveCall>> {
    let table = table();
    tensors.iter().map(|tensor| live(&table, tensor)).collect()
}

/// Whether the call that the tensor with this id is the result of is known.
pub(crate) fn is_known(result: TensorId) -> bool {
    table().contains_key(&result)
}

/// Returns all calls that `result` depends on, with their results, in the order of candle's backward (a depth-first walk,
/// reversed). `None` if one of its operations is not known.
pub(crate) fn known_graph(result: &Tensor) -> Option<Vec<(Tensor, LiveCall)>> {
    let table = table();
    let mut seen = FxHashSet::from_iter([result.id()]);
    let mut done = Vec::new();
    // Calls on the way to the present one, each with the number of its arguments that have been visited.
    let mut way = vec![(result.clone(), live(&table, result)?, 0)];
    while let Some((_, call, visited)) = way.last_mut() {
        let Some(argument) = call.arguments().get(*visited).cloned() else {
            done.extend(way.pop().map(|(result, call, _)| (result, call)));
            continue;
        };
        *visited += 1;
        let has_call = argument.track_op() && !argument.is_variable() && !argument.dtype().is_int();
        if has_call && seen.insert(argument.id()) {
            let call = live(&table, &argument)?;
            way.push((argument, call, 0));
        }
    }
    done.reverse();
    Some(done)
}

fn live(table: &Table, result: &Tensor) -> Option<LiveCall> {
    Some(match table.get(&result.id())?.clone() {
        Call::One(arguments, op) => Call::One(arguments, op.upgrade()?),
        Call::Two(arguments, op) => Call::Two(arguments, op.upgrade()?),
        Call::Three(arguments, op) => Call::Three(arguments, op.upgrade()?),
        Call::View(arguments) => Call::View(arguments),
    })
}

fn table() -> MutexGuard<'static, Table> {
    lock(&TABLE)
}
