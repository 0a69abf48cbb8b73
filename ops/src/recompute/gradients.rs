//! Backward with recomputed parts: collects gradients of variables inside parts, to which the loss's graph does not
//! lead.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId};

use crate::{Error, tape};

/// Gradients by id of their variable.
type Gradients = HashMap<TensorId, Tensor>;

thread_local! {
    /// `None` outside of [`backward`] and recomputation.
    static COLLECTED: RefCell<Option<Gradients>> = const { RefCell::new(None) };
}

/// Runs backward from `loss` and returns the gradients of all variables, including those in recomputed parts
/// ([`recompute`]), which candle's `loss.backward()` cannot return. Without such parts it equals candle's.
///
/// [`recompute`]: crate::recompute
///
/// # Cost
/// The cost of candle's backward, and one sum for each variable that has gradients both inside and outside of parts.
///
/// # Errors
/// Errors of candle's backward.
///
/// ```
/// use candle_core::{Device, Var};
/// use ops::{backward, recompute};
///
/// let (x, weight) = (Var::new(&[3f32], &Device::Cpu)?, Var::new(&[2f32], &Device::Cpu)?);
/// let factor = weight.clone();
/// let loss = (recompute(&x, move |x| x * factor.as_tensor())? * weight.as_tensor())?.sum_all()?;
/// let grads = backward(&loss)?;
/// assert_eq!(grads.get(&weight).unwrap().to_vec1::<f32>()?, [12.0]);
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [4.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn backward(loss: &Tensor) -> Result<GradStore> {
    let (mut grads, left) = collected(loss)?;
    for (id, gradient) in left {
        let sum = match grads.get_id(id) {
            Some(other) => (other + gradient)?,
            None => gradient,
        };
        grads.insert_id(id, sum);
    }
    Ok(grads)
}

/// Backward from the result of a part: returns the gradients of its variables.
pub(super) fn part_gradients(root: &Tensor) -> Result<Gradients> {
    let (mut grads, mut all) = collected(root)?;
    for variable in root.sorted_nodes().into_iter().filter(|node| node.is_variable()) {
        if let Some(gradient) = grads.remove(variable) {
            add(&mut all, variable.id(), gradient)?;
        }
    }
    Ok(all)
}

/// Adds gradients to the enclosing backward's collection.
pub(super) fn add_to_enclosing(gradients: Gradients) -> Result<()> {
    COLLECTED.with_borrow_mut(|sink| match sink {
        _ if gradients.is_empty() => Ok(()),
        Some(sink) => gradients.into_iter().try_for_each(|(id, gradient)| add(sink, id, gradient)),
        None => Err(Error::OutsideBackward { variables: gradients.len() }.into()),
    })
}

/// Returns the gradients in the graph of `loss`, and those that parts have left.
fn collected(loss: &Tensor) -> Result<(GradStore, Gradients)> {
    /// Restores the earlier collection, also after a panic.
    struct Before(Option<Gradients>);
    impl Drop for Before {
        fn drop(&mut self) {
            COLLECTED.set(self.0.take());
        }
    }
    let before = Before(COLLECTED.replace(Some(Gradients::new())));
    let grads = tape::backward(loss)?;
    let left = COLLECTED.take().unwrap_or_default();
    drop(before);
    Ok((grads, left))
}

fn add(all: &mut Gradients, id: TensorId, gradient: Tensor) -> Result<()> {
    match all.entry(id) {
        Entry::Occupied(mut sum) => {
            let new = (sum.get() + gradient)?;
            sum.insert(new);
        }
        Entry::Vacant(place) => drop(place.insert(gradient)),
    }
    Ok(())
}
