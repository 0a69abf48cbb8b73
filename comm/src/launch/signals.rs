//! Signals to the launcher, while it has ranks to look after.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

use super::supervise::Event;
use crate::{Error, Result};

const PASSED_ON: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// True while no launcher runs in this process: signals then do what they do by default.
static IDLE: AtomicBool = AtomicBool::new(true);
/// Launchers that run in this process; `None` until the first one has run.
static RUNNING: Mutex<Option<usize>> = Mutex::new(None);

/// Turns signals into events until it is dropped.
#[derive(Debug)]
pub(super) struct SignalRelay {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalRelay {
    pub(super) fn start(events: &Sender<Event>) -> Result<Self> {
        Self::try_start(events.clone()).map_err(|e| Error::system("cannot listen for signals", e))
    }

    fn try_start(events: Sender<Event>) -> std::io::Result<Self> {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let ignored = Mask::of_this_process("SigIgn:");
        if running.is_none() {
            // A handler stays installed for good once it was: from now on the default action is up to this process.
            // A signal that the program handles itself is left to that handler.
            let handled = Mask::of_this_process("SigCgt:");
            for signal in PASSED_ON.into_iter().filter(|&s| !ignored.has(s) && !handled.has(s)) {
                signal_hook::flag::register_conditional_default(signal, &IDLE)?;
            }
            *running = Some(0);
        }
        // Under `nohup` and the like a signal stays ignored. But where SIGCHLD is, no exit status could be learnt.
        let mut wanted: Vec<i32> = PASSED_ON.into_iter().filter(|&s| !ignored.has(s)).collect();
        wanted.extend(ignored.has(SIGCHLD).then_some(SIGCHLD));
        let mut signals = Signals::new(wanted)?;
        let handle = signals.handle();
        let relay = move || {
            for signal in signals.forever().filter(|&signal| signal != SIGCHLD) {
                // Nobody listens any more where the launcher is about to return.
                let _ = events.send(Event::Signal(signal));
            }
        };
        let thread = std::thread::Builder::new().name("signals".into()).spawn(relay)?;
        *running = running.map(|count| count + 1);
        IDLE.store(false, Ordering::SeqCst);
        Ok(Self { handle, thread: Some(thread) })
    }
}

impl Drop for SignalRelay {
    fn drop(&mut self) {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        *running = running.map(|count| count.saturating_sub(1));
        IDLE.store(*running == Some(0), Ordering::SeqCst);
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // It only fails if it panicked, and then it has ended.
            let _ = thread.join();
        }
    }
}

/// A set of signals, as Linux shows it; empty elsewhere.
struct Mask(u64);

impl Mask {
    fn of_this_process(field: &str) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let digits = status.lines().find_map(|line| line.strip_prefix(field));
        Self(digits.and_then(|digits| u64::from_str_radix(digits.trim(), 16).ok()).unwrap_or(0))
    }

    fn has(&self, signal: i32) -> bool {
        self.0 >> (signal - 1) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mask_counts_signals_from_one() {
        let mask = Mask(0x4001);
        assert!(mask.has(SIGHUP) && mask.has(SIGTERM) && !mask.has(SIGINT));
    }
}
