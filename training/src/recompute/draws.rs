//! Random numbers of a part that runs twice: the second time it gets those of the first.

use std::cell::RefCell;

use candle_core::Result;

use crate::Error;

thread_local! {
    /// Parts that run, the innermost last.
    static RUNNING: RefCell<Vec<Running>> = const { RefCell::new(Vec::new()) };
}

/// One part.
enum Running {
    First(Vec<u64>),
    Again { draws: Vec<u64>, next: usize },
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
    RUNNING.with_borrow_mut(|running| {
        // Those within the one that runs again, or all.
        let firsts = running.iter_mut().rev().map_while(|part| match part {
            Running::First(draws) => Some(draws),
            Running::Again { .. } => None,
        });
        firsts.for_each(|draws| draws.push(number));
    });
    number
}

/// Runs a part for the first time: what it gives, and what it drew.
pub(super) fn recorded<T>(part: impl FnOnce() -> Result<T>) -> Result<(T, Vec<u64>)> {
    match running(Running::First(Vec::new()), part)? {
        (given, Some(Running::First(draws))) => Ok((given, draws)),
        (given, _) => Ok((given, Vec::new())),
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
