//! A part that runs twice: the second time it gets the random numbers of the first.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{Result, TensorId};

use crate::Error;

thread_local! {
    /// Parts that run, the innermost last.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

/// One part.
enum Running {
    First(Met),
    Again { draws: Vec<u64>, next: usize },
}

/// What a part has met that runs for the first time.
#[derive(Default)]
pub(super) struct Met {
    /// The random numbers that it drew.
    pub(super) draws: Vec<u64>,
    pub(super) members: Vec<Arc<dyn PartMember>>,
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
            Running::Again { draws, next } => {
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

/// Runs a part for the first time.
pub(super) fn recorded<T>(part: impl FnOnce() -> Result<T>) -> Result<(T, Met)> {
    match running(Running::First(Met::default()), part)? {
        (given, Some(Running::First(met))) => Ok((given, met)),
        (given, _) => Ok((given, Met::default())),
    }
}

/// Runs it again.
pub(super) fn replayed<T>(draws: &[u64], part: impl FnOnce() -> Result<T>) -> Result<T> {
    let (given, end) = running(Running::Again { draws: draws.to_vec(), next: 0 }, part)?;
    match end {
        Some(Running::Again { next, .. }) if next != draws.len() => {
            let numbers = |count: usize| format!("{count} random numbers");
            let (first, again) = (numbers(draws.len()), numbers(next));
            Err(Error::NotRepeated { what: "it drew", first, again }.into())
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
