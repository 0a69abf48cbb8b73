//! Wake-up of a sleeping end of the ring, for the model checker: a wake-up sent before its receiver sleeps is not lost.

use loom::sync::Notify;

#[derive(Debug)]
pub(super) struct WakeUp(Notify);

impl WakeUp {
    pub(super) fn new() -> Self {
        Self(Notify::new())
    }

    pub(super) fn signal(&self) {
        self.0.notify();
    }

    pub(super) fn wait(&self) {
        self.0.wait();
    }
}
