//! Locking a mutex, whatever has become of others that locked it.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; a panic elsewhere while it was locked has left nothing half-done here.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
