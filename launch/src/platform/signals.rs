//! Signal dispositions of this process.

use super::system;

/// A set of signals: bit 0 stands for signal 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask(u64);

impl Mask {
    /// Returns the signals that this process ignores.
    pub(crate) fn ignored() -> Self {
        Self(system::dispositions::ignored())
    }

    /// Returns the signals for which this process has a handler.
    pub(crate) fn handled() -> Self {
        Self(system::dispositions::handled())
    }

    pub(crate) fn has(self, signal: i32) -> bool {
        self.0 >> (signal - 1) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2, SIGWINCH};

    #[test]
    fn a_mask_counts_signals_from_one() {
        let mask = Mask(0x4001);
        assert!(mask.has(SIGHUP) && mask.has(SIGTERM) && !mask.has(SIGINT));
    }

    #[test]
    fn a_handler_is_seen() {
        // SIGWINCH: a signal that no other test of this program uses.
        let before = Mask::handled();
        assert!(!before.has(SIGWINCH) && !Mask::ignored().has(SIGWINCH));
        let id = signal_hook::flag::register(SIGWINCH, std::sync::Arc::default()).unwrap();
        assert!(Mask::handled().has(SIGWINCH) && !Mask::ignored().has(SIGWINCH));
        // An emulator may have handlers of its own.
        assert_eq!(Mask::handled().has(SIGUSR2), before.has(SIGUSR2));
        signal_hook::low_level::unregister(id);
    }
}
