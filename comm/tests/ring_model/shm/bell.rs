//! A bell, as the ring knows it: rung once, it wakes its owner now or when it next wants to sleep.

use loom::sync::Notify;

#[derive(Debug)]
pub(super) struct Bell(Notify);

impl Bell {
    pub(super) fn new() -> Self {
        Self(Notify::new())
    }

    pub(super) fn ring(&self) {
        self.0.notify();
    }

    pub(super) fn wait(&self) {
        self.0.wait();
    }
}
