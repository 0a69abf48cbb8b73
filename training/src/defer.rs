//! Backward in two parts: first what others wait for, later the gradients of weights.

use std::cell::RefCell;

use candle_core::{Result, Tensor, TensorId};

thread_local! {
    static QUEUE: RefCell<Option<Vec<Deferred>>> = const { RefCell::new(None) };
}

type Compute = Box<dyn FnOnce() -> Result<Vec<Tensor>>>;

/// The gradients of one layer's weights, to be computed.
struct Deferred {
    weights: Vec<TensorId>,
    compute: Compute,
}

/// Gradients of weights that a backward pass has left out. What they are computed from is kept until then.
///
/// See [`defer_weights`].
#[must_use = "the gradients are computed by `compute`"]
pub struct DeferredGrads(Vec<Deferred>);

impl DeferredGrads {
    /// Computes them and gives each, with its variable's id, to `take`. A weight that was used several times comes several
    /// times: its gradient is the sum.
    ///
    /// # Errors
    /// What candle or `take` fails with.
    pub fn compute(self, mut take: impl FnMut(TensorId, Tensor) -> Result<()>) -> Result<()> {
        for Deferred { weights, compute } in self.0 {
            let gradients = compute()?;
            weights.into_iter().zip(gradients).try_for_each(|(id, gradient)| take(id, gradient))?;
        }
        Ok(())
    }

    /// The weights whose gradients will be given to `take`, in that order; one that was used several times, several times.
    pub fn weights(&self) -> impl Iterator<Item = TensorId> {
        self.0.iter().flat_map(|deferred| deferred.weights.iter().copied())
    }

    /// Layers that wait.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True where nothing was left out.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs a backward pass without the gradients of the weights of [`crate::Linear`] layers and of all others that [`defer`] theirs:
/// they are the other result, to be computed at a better time. Nothing is computed twice. Other layers' weights get their gradients as always.
///
/// It holds for this thread, while `backward` runs.
///
/// # Source
/// Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
///
/// # Errors
/// What `backward` fails with.
///
/// ```
/// use candle_core::{Device, Module, Tensor, Var};
/// use training::{Linear, defer_weights};
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
    /// Puts back what was there before, also after a panic.
    struct Before(Option<Vec<Deferred>>);
    impl Drop for Before {
        fn drop(&mut self) {
            QUEUE.set(self.0.take());
        }
    }
    let before = Before(QUEUE.replace(Some(Vec::new())));
    let result = backward()?;
    let deferred = QUEUE.take().unwrap_or_default();
    drop(before);
    Ok((result, DeferredGrads(deferred)))
}

/// For a layer's own backward pass: puts the gradients of these weights off, where whoever runs it wants that. `compute` gives
/// them in the same order.
///
/// False where nobody wants it now, or where they are no variables: then the gradients are to be given at once.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use training::{defer, defer_weights};
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
