//! A part that runs twice: the second time it gets the random numbers of the first, and where these are kept the results of products.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use candle_core::{Result, Tensor, TensorId};

use crate::Error;

thread_local! {
    /// Parts that run, the innermost last.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
    /// Whether a layer computes whose result is kept.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// One part.
enum Running {
    First(Met),
    Again { draws: Vec<u64>, next: usize, results: Option<Results>, next_result: usize },
}

/// What operations gave, one after the other.
pub(super) type Results = Vec<Vec<Tensor>>;

/// What a part has met that runs for the first time.
#[derive(Default)]
pub(super) struct Met {
    /// The random numbers that it drew.
    pub(super) draws: Vec<u64>,
    pub(super) members: Vec<Arc<dyn PartMember>>,
    /// The results of its products, where they are kept.
    pub(super) results: Option<Results>,
}

/// Something that runs inside of parts, such as a unit of `Fsdp`, and must find them in the graph of a loss, which does not lead inside.
pub trait PartMember: Send + Sync {
    /// A part has run, which gave this. Of parts in one another, the outermost comes last.
    fn is_in(&self, node: TensorId);
}

/// Tells the parts that run for the first time on this thread of something that runs in them. They keep it.
///
/// ```
/// use std::sync::{Arc, OnceLock};
/// use candle_core::{Device, TensorId, Var};
/// use training::{PartMember, recompute, runs_in_part};
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
    RUNNING.with_borrow_mut(|running| firsts(running).for_each(|met| met.members.push(member.clone())));
}

/// Those within the one that runs again, or all.
fn firsts(running: &mut [Running]) -> impl Iterator<Item = &mut Met> {
    running.iter_mut().rev().map_while(|part| match part {
        Running::First(met) => Some(met),
        Running::Again { .. } => None,
    })
}

/// For layers that draw random numbers in forward: `new`'s number, or in a part that backward computes again
/// ([`recompute`](crate::recompute)), the one that was drawn in its place the first time. A layer that needs many draws one, and makes
/// the others from it.
///
/// ```
/// use candle_core::{Device, Var};
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use training::{backward, drawn, recompute};
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
    // A part that draws more than the first time fails when it ends.
    let number = known.flatten().unwrap_or_else(new);
    RUNNING.with_borrow_mut(|running| firsts(running).for_each(|met| met.draws.push(number)));
    number
}

/// For layers whose products are worth keeping where the cheap rest is computed again ([`recompute_cheap`](crate::recompute_cheap)). `make`
/// gives the layer's result; in backward it is given what it gave the first time, to give a copy of that in place of the product: with a
/// history, so that backward goes on from there.
///
/// # Errors
/// What `make` fails with.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use candle_core::{Device, Var};
/// use training::{backward, kept_result, recompute_cheap};
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
    /// Layers inside of this one keep nothing: ends with it, however it ends.
    struct Within;
    impl Drop for Within {
        fn drop(&mut self) {
            WITHIN.set(false);
        }
    }
    if WITHIN.get() {
        return make(None);
    }
    let known = known_results().and_then(|mut known| known.pop());
    WITHIN.set(true);
    let within = Within;
    let result = make(known)?;
    drop(within);
    keep_results(|| Ok(vec![result.detach()]))?;
    Ok(result)
}

/// What an operation gave the first time, in a part that runs again and keeps it.
pub(crate) fn known_results() -> Option<Vec<Tensor>> {
    if WITHIN.get() {
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

/// Whether some part wants to keep results.
pub(crate) fn keeps_results() -> bool {
    !WITHIN.get() && RUNNING.with_borrow_mut(|running| firsts(running).any(|met| met.results.is_some()))
}

/// Keeps what an operation has given where some part wants that; called as often as [`known_results`].
pub(crate) fn keep_results(results: impl FnOnce() -> Result<Vec<Tensor>>) -> Result<()> {
    if !keeps_results() {
        return Ok(());
    }
    let results = results()?;
    RUNNING.with_borrow_mut(|running| {
        let all = firsts(running).filter_map(|met| met.results.as_mut());
        all.for_each(|all| all.push(results.clone()));
    });
    Ok(())
}

/// Runs a part for the first time, and perhaps keeps the results of its products.
pub(super) fn recorded<T>(keeps: bool, part: impl FnOnce() -> Result<T>) -> Result<(T, Met)> {
    let met = Met { results: keeps.then(Vec::new), ..Met::default() };
    match running(Running::First(met), part)? {
        (given, Some(Running::First(met))) => Ok((given, met)),
        (given, _) => Ok((given, Met::default())),
    }
}

/// Runs it again.
pub(super) fn replayed<T>(met: &Met, part: impl FnOnce() -> Result<T>) -> Result<T> {
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
    /// Ends the part, however it ends.
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
