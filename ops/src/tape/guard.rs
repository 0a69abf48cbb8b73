//! Guards: checks that run when backward reaches a variable.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock, RwLockWriteGuard};

use candle_core::{Result, Tensor, TensorId};

/// The check of each guarded variable.
static CHECKS: LazyLock<RwLock<HashMap<TensorId, Arc<Check>>>> = LazyLock::new(RwLock::default);

/// Number of guards: if it is 0, operations skip the look-up.
static COUNT: AtomicUsize = AtomicUsize::new(0);

type Check = dyn Fn() -> Result<()> + Send + Sync;

/// While it exists, backward runs a check at a variable: see [`guard`].
#[must_use = "a guard ends when it is dropped"]
pub struct Guard {
    variable: TensorId,
    check: Arc<Check>,
}

/// Registers `check`, which is called whenever backward, including candle's own, goes through an operation applied
/// directly to `variable` by [`apply_op1`](crate::tape::apply_op1) or its siblings; an error aborts backward. Operations on
/// views of the variable, and candle's own operations, do not call it. A variable has one check: a second one
/// replaces the first.
///
/// ```
/// use candle_core::{Device, Var, bail};
///
/// let x = Var::new(&[1f32], &Device::Cpu)?;
/// let guard = ops::tape::guard(&x, || bail!("not here"));
/// let loss = ops::tape::scale(&x, 2.0)?.sum_all()?;
/// assert!(loss.backward().unwrap_err().to_string().contains("not here"));
/// drop(guard);
/// assert_eq!(loss.backward()?.get(&x).unwrap().to_vec1::<f32>()?, [2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn guard(variable: &Tensor, check: impl Fn() -> Result<()> + Send + Sync + 'static) -> Guard {
    let guard = Guard { variable: variable.id(), check: Arc::new(check) };
    let mut checks = checks();
    checks.insert(guard.variable, guard.check.clone());
    COUNT.store(checks.len(), Ordering::Release);
    guard
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut checks = checks();
        // A later guard of the variable has replaced the check: that one stays.
        if checks.get(&self.variable).is_some_and(|check| Arc::ptr_eq(check, &self.check)) {
            checks.remove(&self.variable);
        }
        COUNT.store(checks.len(), Ordering::Release);
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Guard").field(&self.variable).finish()
    }
}

/// Runs the checks of these arguments; called by an operation's backward.
pub(crate) fn run_checks(arguments: &[&Tensor]) -> Result<()> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    for argument in arguments.iter().filter(|argument| argument.is_variable()) {
        let check = CHECKS.read().unwrap_or_else(PoisonError::into_inner).get(&argument.id()).cloned();
        if let Some(check) = check {
            check()?;
        }
    }
    Ok(())
}

fn checks() -> RwLockWriteGuard<'static, HashMap<TensorId, Arc<Check>>> {
    CHECKS.write().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var, bail};

    #[test]
    fn a_guard_that_was_replaced_leaves_the_later_one_in_place() {
        let x = Var::new(&[1f32], &Device::Cpu).unwrap();
        let loss = crate::tape::scale(&x, 2.0).unwrap().sum_all().unwrap();
        let first = guard(&x, || bail!("first"));
        let second = guard(&x, || bail!("second"));
        drop(first);
        assert!(loss.backward().unwrap_err().to_string().contains("second"));
        drop(second);
        loss.backward().unwrap();
    }
}
