//! Signal dispositions of this process, queried for each signal.
#![allow(unsafe_code, reason = "no safe function asks for a signal's handler without setting one")]

use std::mem::MaybeUninit;
use std::ptr::null;

pub(crate) fn ignored() -> u64 {
    those_with(|handler| handler == libc::SIG_IGN)
}

pub(crate) fn handled() -> u64 {
    those_with(|handler| handler != libc::SIG_IGN && handler != libc::SIG_DFL)
}

/// Returns the mask of signals whose handler satisfies `what`. Bit 0 stands for signal 1; 31 is the last signal that
/// every system has.
fn those_with(what: impl Fn(libc::sighandler_t) -> bool) -> u64 {
    let has = |signal: &i32| handler(*signal).is_some_and(&what);
    (1..=31).filter(has).fold(0, |mask, signal| mask | 1 << (signal - 1))
}

fn handler(signal: i32) -> Option<libc::sighandler_t> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: without a new action nothing changes; the old one is written to `action`, which has room for it.
    let status = unsafe { libc::sigaction(signal, null(), action.as_mut_ptr()) };
    // SAFETY: the system has written it.
    (status == 0).then(|| unsafe { action.assume_init() }.sa_sigaction)
}
