//! Locking without poisoning, for all crates above.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after another thread has panicked with it: for what no thread leaves half changed.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
