//! Scoped thread-local values.

use std::cell::RefCell;
use std::thread::LocalKey;

/// Runs `f` while `place` has the value `value`; restores the earlier value, also after a panic.
pub fn scoped<V: 'static, R>(place: &'static LocalKey<RefCell<V>>, value: V, f: impl FnOnce() -> R) -> R {
    struct Before<V: 'static>(&'static LocalKey<RefCell<V>>, Option<V>);
    impl<V> Drop for Before<V> {
        fn drop(&mut self) {
            if let Some(before) = self.1.take() {
                self.0.set(before);
            }
        }
    }
    let _before = Before(place, Some(place.replace(value)));
    f()
}
