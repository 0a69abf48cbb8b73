//! Record and replay of a part: its second run gets the random numbers, and if kept the results of products, of the
//! first.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::{Result, Tensor, TensorId};

use crate::Error;

thread_local! {
    /// Running parts, innermost last.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
    /// Whether a layer is running whose result will be kept.
    static IN_KEPT_LAYER: Cell<bool> = const { Cell::new(false) };
}

/// State of a running part.
enum Running {
    First(Record),
    Again { draws: Vec<u64>, next: usize, results: Option<Results>, next_result: usize },
}

/// Recorded results of operations, in order.
pub(super) type Results = Vec<Vec<Tensor>>;

/// Record of a part's first run.
#[derive(Default)]
pub(super) struct Record {
    /// The random numbers it drew.
    pub(super) draws: Vec<u64>,
    pub(super) members: Vec<Arc<dyn PartMember>>,
    /// The results of its products, if they are kept.
    pub(super) results: Option<Results>,
}

/// An object used inside parts, such as a unit of `Fsdp`, that needs the parts' nodes in the graph of a loss, since
/// that graph does not show what is inside a part.
pub trait PartMember: Send + Sync {
    /// Called after the first run of a part that used it, with the id of the part's result. For nested parts, the
    /// outermost comes last.
    fn is_in(&self, node: TensorId);
}

/// Registers `member` with the parts that are running for the first time on this thread, which hold a reference to
/// it.
///
/// ```
/// use std::sync::{Arc, OnceLock};
/// use candle_core::{Device, TensorId, Var};
/// use ops::{PartMember, recompute, runs_in_part};
///
/// #[derive(Default)]
/// struct Noted(OnceLock<TensorId>);
///
/// impl PartMember for Noted {
///     fn is_in(&self, node: TensorId) {
///         let _ = self.0.set(node);
///     }
/// }
///
/// let (x, noted) = (Var::new(&[1f32], &Device::Cpu)?, Arc::new(Noted::default()));
/// let member = noted.clone();
/// let y = recompute(&x, move |x| {
///     runs_in_part(&(member.clone() as _));
///     x.sqr()
/// })?;
/// assert_eq!(noted.0.get(), Some(&y.id()));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn runs_in_part(member: &Arc<dyn PartMember>) {
    RUNNING
        .with_borrow_mut(|running| recording_parts(running).for_each(|met| met.members.push(member.clone())));
}

/// Records of parts in their first run, innermost first, up to the innermost part that is being replayed.
fn recording_parts(running: &mut [Running]) -> impl Iterator<Item = &mut Record> {
    running.iter_mut().rev().map_while(|part| match part {
        Running::First(met) => Some(met),
        Running::Again { .. } => None,
    })
}

/// For layers that draw random numbers in forward: returns `new()`, or in a part that backward recomputes
/// ([`recompute`](crate::recompute)), the number drawn at this point in the first run. A layer that needs many
/// numbers draws one, and derives the others from it.
///
/// ```
/// use candle_core::{Device, Var};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use ops::{backward, drawn, recompute};
///
/// static COUNTER: AtomicU64 = AtomicU64::new(1);
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let y = recompute(&x, |x| x * drawn(|| COUNTER.fetch_add(1, Ordering::Relaxed)) as f64)?;
/// assert_eq!(backward(&y)?.get(&x).unwrap().to_vec1::<f32>()?, [1.0]);
/// assert_eq!(COUNTER.load(Ordering::Relaxed), 2);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn drawn(new: impl FnOnce() -> u64) -> u64 {
    let known = RUNNING.with_borrow_mut(|running| {
        running.iter_mut().rev().find_map(|part| match part {
            Running::First(_) => None,
            Running::Again { draws, next, .. } => {
                *next += 1;
                Some(draws.get(*next - 1).copied())
            }
        })
    });
    // A part that draws more numbers than the first time fails when it ends.
    let number = known.flatten().unwrap_or_else(new);
    RUNNING.with_borrow_mut(|running| recording_parts(running).for_each(|met| met.draws.push(number)));
    number
}

/// For layers whose products are kept where cheap operations are recomputed
/// ([`recompute_cheap`](crate::recompute_cheap)). `make` returns the layer's result. In recomputation it receives the
/// result of the first run and must return a copy of it instead of the product, recorded in the graph so that
/// backward can continue from it.
///
/// # Errors
/// Errors of `make`.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use candle_core::{Device, Var};
/// use ops::{backward, kept_result, recompute_cheap};
///
/// static PRODUCTS: AtomicUsize = AtomicUsize::new(0);
/// let (x, weight) = (Var::new(&[[2f32]], &Device::Cpu)?, Var::new(&[[3f32]], &Device::Cpu)?);
/// let matrix = weight.clone();
/// let y = recompute_cheap(&x, move |x| {
///     let x = x.tanh()?;
///     let product = kept_result(|known| {
///         let (input, matrix) = (x.detach(), matrix.as_detached_tensor());
///         let output = known.map_or_else(
///             || {
///                 PRODUCTS.fetch_add(1, Ordering::Relaxed);
///                 input.matmul(&matrix)
///             },
///             |known| known.force_contiguous(),
///         )?;
///         # // What `comm::autograd::custom` does in layers.
///         # struct Product([candle_core::Tensor; 3]);
///         # impl candle_core::CustomOp1 for Product {
///         #     fn name(&self) -> &'static str { "product" }
///         #     fn cpu_fwd(&self, _: &candle_core::CpuStorage, _: &candle_core::Layout)
///         #         -> candle_core::Result<(candle_core::CpuStorage, candle_core::Shape)> {
///         #         let numbers = self.0[2].flatten_all()?.to_vec1::<f32>()?;
///         #         Ok((candle_core::CpuStorage::F32(numbers), self.0[2].shape().clone()))
///         #     }
///         #     fn bwd(&self, _: &candle_core::Tensor, _: &candle_core::Tensor, gradient: &candle_core::Tensor)
///         #         -> candle_core::Result<Option<candle_core::Tensor>> {
///         #         Ok(Some(gradient.matmul(&self.0[1].t()?)?))
///         #     }
///         # }
///         x.apply_op1(Product([input, matrix, output]))
///     })?;
///     product.sqr()
/// })?;
/// assert!(backward(&y)?.get(&x).is_some());
/// assert_eq!(PRODUCTS.load(Ordering::Relaxed), 1);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn kept_result(make: impl FnOnce(Option<Tensor>) -> Result<Tensor>) -> Result<Tensor> {
    /// Resets the flag, also after an error or panic. Layers inside of this one keep nothing.
    struct Within;
    impl Drop for Within {
        fn drop(&mut self) {
            IN_KEPT_LAYER.set(false);
        }
    }
    if IN_KEPT_LAYER.get() {
        return make(None);
    }
    let known = known_results().and_then(|mut known| known.pop());
    IN_KEPT_LAYER.set(true);
    let within = Within;
    let result = make(known)?;
    drop(within);
    keep_results(|| Ok(vec![result.detach()]))?;
    Ok(result)
}

/// Results of this operation in the first run, if this is a replay of a part that keeps them.
pub(crate) fn known_results() -> Option<Vec<Tensor>> {
    if IN_KEPT_LAYER.get() {
        return None;
    }
    RUNNING.with_borrow_mut(|running| {
        let again = running.iter_mut().rev().find_map(|part| match part {
            Running::First(_) => None,
            Running::Again { results, next_result, .. } => Some((results.as_ref()?, next_result)),
        });
        let (results, next) = again?;
        *next += 1;
        results.get(*next - 1).cloned()
    })
}

/// Whether any part in its first run keeps results.
pub(crate) fn keeps_results() -> bool {
    !IN_KEPT_LAYER.get()
        && RUNNING.with_borrow_mut(|running| recording_parts(running).any(|met| met.results.is_some()))
}

/// Records an operation's results in the parts that keep them; must be called as often as [`known_results`].
pub(crate) fn keep_results(results: impl FnOnce() -> Result<Vec<Tensor>>) -> Result<()> {
    if !keeps_results() {
        return Ok(());
    }
    let results = results()?;
    RUNNING.with_borrow_mut(|running| {
        let all = recording_parts(running).filter_map(|met| met.results.as_mut());
        all.for_each(|all| all.push(results.clone()));
    });
    Ok(())
}

/// Runs a part for the first time, keeping the results of its products if `keeps`.
pub(super) fn recorded<T>(keeps: bool, part: impl FnOnce() -> Result<T>) -> Result<(T, Record)> {
    let met = Record { results: keeps.then(Vec::new), ..Record::default() };
    match running(Running::First(met), part)? {
        (given, Some(Running::First(met))) => Ok((given, met)),
        (given, _) => Ok((given, Record::default())),
    }
}

/// Runs a part again with its record, and checks that it repeats the first run.
pub(super) fn replayed<T>(met: &Record, part: impl FnOnce() -> Result<T>) -> Result<T> {
    let (draws, results) = (met.draws.clone(), met.results.clone());
    let (given, end) = running(Running::Again { draws, next: 0, results, next_result: 0 }, part)?;
    let Some(Running::Again { next, next_result, results, .. }) = end else { return Ok(given) };
    if next != met.draws.len() {
        let numbers = |count: usize| format!("{count} random numbers");
        let (first, again) = (numbers(met.draws.len()), numbers(next));
        return Err(Error::NotRepeated { what: "it drew", first, again }.into());
    }
    match results {
        Some(results) if results.len() != next_result => {
            let products = |count: usize| format!("{count} products");
            let (first, again) = (products(results.len()), products(next_result));
            Err(Error::NotRepeated { what: "it computed", first, again }.into())
        }
        _ => Ok(given),
    }
}

fn running<T>(begin: Running, part: impl FnOnce() -> Result<T>) -> Result<(T, Option<Running>)> {
    /// Removes the part from the stack, also after an error or panic.
    struct Depth(usize);
    impl Drop for Depth {
        fn drop(&mut self) {
            RUNNING.with_borrow_mut(|running| running.truncate(self.0));
        }
    }
    let depth = RUNNING.with_borrow_mut(|running| {
        running.push(begin);
        Depth(running.len() - 1)
    });
    let given = part()?;
    let end = RUNNING.with_borrow_mut(|running| running.drain(depth.0..).next());
    Ok((given, end))
}
