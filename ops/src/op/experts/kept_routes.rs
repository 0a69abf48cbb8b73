//! Choices of experts that are kept while parameters change a little.

use std::cell::RefCell;

use crate::scoped::scoped;

thread_local! {
    static CURRENT: RefCell<Option<RouteRecord>> = const { RefCell::new(None) };
}

/// The choices of all routers in a forward pass. The loss jumps where another expert is chosen, and its gradient is that of the
/// choices that were made: who compares losses of parameters that differ a little keeps the choices of the first pass.
#[derive(Debug, Clone, Default)]
pub struct RouteRecord {
    /// Those of each call of a router, in order.
    choices: Vec<Vec<u32>>,
    /// The next call, if a pass is repeated.
    next: usize,
    is_complete: bool,
}

impl RouteRecord {
    /// Runs a forward pass on this thread: the first with choices of its own, each other one with those of the first.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use ops::{RouteRecord, Router};
    ///
    /// let (router, mut record) = (Router::new("gate", 1)?, RouteRecord::default());
    /// let mut chosen = |scores: [f64; 2]| {
    ///     let scores = Tensor::new(&[scores], &Device::Cpu)?;
    ///     record.pass(|| Ok::<_, candle_core::Error>(router.route(&scores)?.experts().to_vec()))
    /// };
    /// assert_eq!((chosen([1.0, 0.9])?, chosen([0.9, 1.0])?), (vec![0], vec![0]));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn pass<T>(&mut self, forward: impl FnOnce() -> T) -> T {
        self.next = 0;
        let (result, mut record) = scoped(&CURRENT, Some(std::mem::take(self)), || {
            let result = forward();
            (result, CURRENT.take().unwrap_or_default())
        });
        record.is_complete = true;
        *self = record;
        result
    }
}

/// The experts of tokens: `choose` decides, except in a pass that is repeated with as many tokens.
pub(super) fn kept_or(
    len: usize,
    choose: impl FnOnce() -> candle_core::Result<Vec<u32>>,
) -> candle_core::Result<Vec<u32>> {
    let kept = CURRENT.with_borrow_mut(|record| {
        let record = record.as_mut().filter(|record| record.is_complete)?;
        record.next += 1;
        record.choices.get(record.next - 1).filter(|choices| choices.len() == len).cloned()
    });
    if let Some(kept) = kept {
        return Ok(kept);
    }
    let chosen = choose()?;
    CURRENT.with_borrow_mut(|record| {
        if let Some(record) = record.as_mut().filter(|record| !record.is_complete) {
            record.choices.push(chosen.clone());
        }
    });
    Ok(chosen)
}
