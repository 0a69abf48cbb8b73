//! Signal dispositions of this process, queried for each signal. `/proc/self/status` shows those of an emulator as well,
//! where the program runs in one.
#![allow(unsafe_code, reason = "no safe function asks for a signal's handler without setting one")]

use std::mem::MaybeUninit;
use std::ptr::null;

/// A set of signals: bit 0 stands for signal 1, and 31 is the last signal that every system has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mask(u64);

impl Mask {
    /// Returns the signals that this process ignores.
    pub(crate) fn ignored() -> Self {
        Self::of(|handler| handler == libc::SIG_IGN)
    }

    /// Returns the signals for which this process has a handler.
    pub(crate) fn handled() -> Self {
        Self::of(|handler| handler != libc::SIG_IGN && handler != libc::SIG_DFL)
    }

    /// Returns the signals whose handler satisfies `what`.
    fn of(what: impl Fn(libc::sighandler_t) -> bool) -> Self {
        let has = |signal: &i32| handler(*signal).is_some_and(&what);
        Self((1..=31).filter(has).fold(0, |mask, signal| mask | 1 << (signal - 1)))
    }

    pub(crate) fn has(self, signal: i32) -> bool {
        self.0 >> (signal - 1) & 1 == 1
    }
}

fn handler(signal: i32) -> Option<libc::sighandler_t> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action nothing changes; the old one is written to `action`, which has room for it.
    let status = unsafe { libc::sigaction(signal, null(), action.as_mut_ptr()) };
    // SAFETY: the system has written it.
    (status == 0).then(|| unsafe { action.assume_init() }.sa_sigaction)
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
        assert!(!Mask::handled().has(SIGWINCH) && !Mask::ignored().has(SIGWINCH));
        let id = signal_hook::flag::register(SIGWINCH, std::sync::Arc::default()).unwrap();
        assert!(Mask::handled().has(SIGWINCH) && !Mask::ignored().has(SIGWINCH));
        assert!(!Mask::handled().has(SIGUSR2));
        signal_hook::low_level::unregister(id);
    }
}
