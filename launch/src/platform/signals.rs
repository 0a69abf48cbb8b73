//! Signal dispositions of this process, queried for each signal, and masks. `/proc/self/status` shows the dispositions of
//! an emulator as well, where the program runs in one.
#![allow(
    unsafe_code,
    reason = "no safe function asks for a signal's handler without setting one, or changes a mask"
)]

use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::{null, null_mut};

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

/// Lets these signals reach the calling thread, whatever mask it has inherited.
pub(crate) fn unblock(signals: &[i32]) {
    set_unblocked(&set_of(signals));
}

/// Lets these signals reach the process that `command` starts.
pub(crate) fn unblocked<'a>(command: &'a mut Command, signals: &[i32]) -> &'a mut Command {
    let set = set_of(signals);
    let unblock = move || {
        set_unblocked(&set);
        Ok(())
    };
    // SAFETY: between fork and exec only `pthread_sigmask` is called, which is async-signal-safe; no memory is allocated
    // and no lock is taken.
    unsafe { command.pre_exec(unblock) }
}

fn set_of(signals: &[i32]) -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: there is room for a set.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the call before has made it an empty set.
    let mut set = unsafe { set.assume_init() };
    for &signal in signals {
        // SAFETY: it is a set. A number that is no signal's changes nothing.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

fn set_unblocked(set: &libc::sigset_t) {
    // SAFETY: the set is one, and the mask before is not asked for. Fails only for an unknown first argument.
    unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, set, null_mut()) };
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
