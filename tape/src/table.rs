//! Which operation gave a tensor, and of what: candle's graph does not tell.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use candle_core::{CustomOp1, CustomOp2, CustomOp3, Result, Tensor, TensorId};

/// Operations by the tensor that they gave, as long as that is there.
static TABLE: LazyLock<Mutex<Table>> = LazyLock::new(Mutex::default);

type Table = HashMap<TensorId, Call<Weak<Box1>, Weak<Box2>, Weak<Box3>>>;

pub(crate) type Box1 = Box<dyn CustomOp1 + Send + Sync>;
pub(crate) type Box2 = Box<dyn CustomOp2 + Send + Sync>;
pub(crate) type Box3 = Box<dyn CustomOp3 + Send + Sync>;

/// An operation and what it was applied to.
#[derive(Clone)]
pub(crate) enum Call<One, Two, Three> {
    One([Tensor; 1], One),
    Two([Tensor; 2], Two),
    Three([Tensor; 3], Three),
    /// The same numbers in another shape, which candle keeps in the same memory.
    View([Tensor; 1]),
}

/// One whose result is there.
pub(crate) type Known = Call<Arc<Box1>, Arc<Box2>, Arc<Box3>>;

impl Known {
    pub(crate) fn arguments(&self) -> &[Tensor] {
        match self {
            Self::One(arguments, _) => arguments,
            Self::Two(arguments, _) => arguments,
            Self::Three(arguments, _) => arguments,
            Self::View(arguments) => arguments,
        }
    }

    /// The gradients of the arguments, in their order.
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

/// A place in the table. The operation has it, and candle's graph the operation: both go with the result.
#[derive(Default)]
pub(crate) struct Place(OnceLock<TensorId>);

impl Place {
    pub(crate) fn keep(&self, result: &Tensor, call: &Known) {
        if self.0.set(result.id()).is_ok() {
            table().insert(result.id(), call.weak());
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Arguments are let go after the table, which they may have places in.
        let _call = self.0.get().and_then(|result| table().remove(result));
    }
}

/// What gave each of these tensors, where it is known.
pub(crate) fn known(tensors: &[&Tensor]) -> Vec<Option<Known>> {
    let table = table();
    let known = |tensor: &&Tensor| {
        Some(match table.get(&tensor.id())?.clone() {
            Call::One(arguments, op) => Call::One(arguments, op.upgrade()?),
            Call::Two(arguments, op) => Call::Two(arguments, op.upgrade()?),
            Call::Three(arguments, op) => Call::Three(arguments, op.upgrade()?),
            Call::View(arguments) => Call::View(arguments),
        })
    };
    tensors.iter().map(known).collect()
}

fn table() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub(crate) fn has(result: TensorId) -> bool {
    table().contains_key(&result)
}
