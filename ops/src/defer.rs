//! Backward in two parts: first the gradients that other ranks wait for, later the weight gradients.

use std::cell::RefCell;

use candle_core::{Result, Tensor, TensorId};

thread_local! {
    static QUEUE: RefCell<Option<Vec<Deferred>>> = const { RefCell::new(None) };
}

type Compute = Box<dyn FnOnce() -> Result<Vec<Tensor>>>;

/// Weight gradients of one layer, still to be computed.
struct Deferred {
    weights: Vec<TensorId>,
    compute: Compute,
}

/// Weight gradients that a backward pass has deferred. The tensors they are computed from stay alive until then.
///
/// See [`defer_weights`].
#[must_use = "the gradients are computed by `compute`"]
pub struct DeferredGrads(Vec<Deferred>);

impl DeferredGrads {
    /// Computes the gradients and passes each, with its variable's id, to `take`. A weight that was used several
    /// times is passed several times: its gradient is the sum.
    ///
    /// # Errors
    /// Errors of candle or `take`.
    pub fn compute(self, mut take: impl FnMut(TensorId, Tensor) -> Result<()>) -> Result<()> {
        for Deferred { weights, compute } in self.0 {
            let gradients = compute()?;
            weights.into_iter().zip(gradients).try_for_each(|(id, gradient)| take(id, gradient))?;
        }
        Ok(())
    }

    /// The weights whose gradients will be passed to `take`, in that order; a weight that was used several times
    /// appears several times.
    pub fn weights(&self) -> impl Iterator<Item = TensorId> {
        self.0.iter().flat_map(|deferred| deferred.weights.iter().copied())
    }

    /// Number of deferred layer uses.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was deferred.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs a backward pass without the weight gradients of [`crate::Linear`] layers and of any other layer that uses
/// [`defer`]: the second result computes them later. Nothing is computed twice. Weights of other layers get their
/// gradients as usual.
///
/// Applies to this thread, while `backward` runs.
///
/// # Source
/// Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
///
/// # Errors
/// Errors of `backward`.
///
/// ```
/// use candle_core::{Device, Module, Tensor, Var};
/// use ops::{Linear, defer_weights};
///
/// let (x, weight) = (Var::new(&[[3f32]], &Device::Cpu)?, Var::new(&[[2f32]], &Device::Cpu)?);
/// let layer = Linear::new(weight.as_tensor().clone(), Var::new(&[0f32], &Device::Cpu)?.as_tensor().clone());
/// let y = layer.forward(&x)?;
/// let (grads, deferred) = defer_weights(|| y.backward())?;
/// assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[2.0]]);
/// assert!(grads.get(&weight).is_none());
/// deferred.compute(|id, gradient| {
///     if id == weight.id() {
///         assert_eq!(gradient.to_vec2::<f32>()?, [[3.0]]);
///     }
///     Ok(())
/// })?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn defer_weights<T>(backward: impl FnOnce() -> Result<T>) -> Result<(T, DeferredGrads)> {
    /// Restores the earlier queue, also after a panic.
    struct Restore(Option<Vec<Deferred>>);
    impl Drop for Restore {
        fn drop(&mut self) {
            QUEUE.set(self.0.take());
        }
    }
    let before = Restore(QUEUE.replace(Some(Vec::new())));
    let result = backward()?;
    let deferred = QUEUE.take().unwrap_or_default();
    drop(before);
    Ok((result, DeferredGrads(deferred)))
}

/// For a layer's own backward pass: defers the gradients of these weights, if the pass runs inside [`defer_weights`].
/// `compute` returns them in the order of `weights`.
///
/// Returns false outside [`defer_weights`], or if a weight is not a variable: the layer must then return the
/// gradients at once.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use ops::{defer, defer_weights};
///
/// let weight = Var::new(&[2f32], &Device::Cpu)?;
/// let gradient = || Tensor::new(&[3f32], &Device::Cpu);
/// assert!(!defer(&[&weight], move || Ok(vec![gradient()?])));
/// let (put_off, deferred) = defer_weights(|| Ok(defer(&[&weight], move || Ok(vec![gradient()?]))))?;
/// assert!(put_off && deferred.len() == 1);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn defer(weights: &[&Tensor], compute: impl FnOnce() -> Result<Vec<Tensor>> + 'static) -> bool {
    QUEUE.with_borrow_mut(|queue| match queue {
        Some(queue) if weights.iter().all(|weight| weight.is_variable()) => {
            let weights = weights.iter().map(|weight| weight.id()).collect();
            queue.push(Deferred { weights, compute: Box::new(compute) });
            true
        }
        _ => false,
    })
}
