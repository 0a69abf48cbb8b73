//! Handles signals to the launcher while it has ranks.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use comm::launcher::lock;
use comm::{Error, Result};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

use super::event::Event;
use crate::platform::{Mask, unblock};

/// Signals that end the job.
pub(super) const STOP_SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];
/// Signals that are passed on to the ranks: those that end the job, and those whose meaning is the programs' own.
pub(super) const FORWARDED_SIGNALS: [i32; 5] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2];

/// How soon the same signal comes again if it was sent once: GNU `timeout` sends it to its child and then to the process
/// group, a terminal to the whole group. A person who presses Ctrl-C once more takes longer.
const REPEAT_TIME: Duration = Duration::from_secs(1);

/// The signal that ends a job.
#[derive(Debug, Clone, Copy)]
pub(super) struct StopSignal {
    pub(super) number: i32,
    at: Instant,
}

impl StopSignal {
    pub(super) fn new(number: i32) -> Self {
        Self { number, at: Instant::now() }
    }

    /// Whether a signal that arrives now is this one once more, and no wish to end at once.
    pub(super) fn is_repeated_by(self, number: i32) -> bool {
        self.number == number && self.at.elapsed() < REPEAT_TIME
    }
}

/// Returns the event of a signal.
fn event(signal: i32) -> Event {
    if STOP_SIGNALS.contains(&signal) { Event::Signal(signal) } else { Event::UserSignal(signal) }
}

/// True while no launcher runs in this process: signals then have their default effect.
static IDLE: AtomicBool = AtomicBool::new(true);
/// Number of launchers that run in this process; `None` until the first one has started.
static RUNNING: Mutex<Option<usize>> = Mutex::new(None);

/// The action of [`on_signal`], and the launchers that have started in this process since.
static SIGNAL_ACTION: Mutex<Option<SignalAction>> = Mutex::new(None);

struct SignalAction {
    /// Signals that [`on_signal`] handles.
    signals: Vec<i32>,
    /// `None` while it runs: then nothing is locked, so that it may call [`on_signal`].
    action: Option<Action>,
    launchers: Vec<(usize, Sender<Event>)>,
    /// Number of launchers so far; the number of the next one is derived from it.
    count: usize,
}

type Action = Box<dyn FnMut(i32) + Send>;

impl SignalAction {
    /// Passes a signal to the launchers that run. Takes the action out, to be called, if there are none.
    fn pass_on(&mut self, signal: i32) -> Option<Action> {
        for (_, events) in &self.launchers {
            // The receiver is gone if the launcher is about to return.
            let _ = events.send(event(signal));
        }
        if self.launchers.is_empty() { self.action.take() } else { None }
    }
}

/// Sets an action for SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 while this process has no ranks, instead of ending the
/// process; a mask that this process has inherited does not hold them up. Signals that arrive during [`spawn`](super::spawn) are still passed on to the ranks, and none is lost in between. A
/// signal that this process ignores, as under `nohup`, or that it handles already, is left alone. The action runs on
/// its own thread; a second call replaces it.
///
/// # Errors
/// [`Error::System`] if the system refuses.
///
/// ```
/// launch::on_signal(|signal| {
///     eprintln!("stopped by signal {signal}");
///     std::process::exit(128 + signal);
/// })?;
/// # Ok::<(), comm::Error>(())
/// ```
pub fn on_signal(action: impl FnMut(i32) + Send + 'static) -> Result<()> {
    let mut handling = lock(&SIGNAL_ACTION);
    let action: Option<Action> = Some(Box::new(action));
    if let Some(handling) = &mut *handling {
        handling.action = action;
        return Ok(());
    }
    let refused = |e| Error::system("cannot listen for signals", e);
    let taken = [Mask::ignored(), Mask::handled()];
    let is_free = |signal: &i32| !taken.iter().any(|mask| mask.has(*signal));
    let signals: Vec<i32> = FORWARDED_SIGNALS.into_iter().filter(is_free).collect();
    let mut all = Signals::new(&signals).map_err(refused)?;
    let listen = move || {
        unblock(&FORWARDED_SIGNALS);
        for signal in all.forever() {
            let action = lock(&SIGNAL_ACTION).as_mut().and_then(|handling| handling.pass_on(signal));
            let Some(mut action) = action else { continue };
            action(signal);
            // Unless it has set another one.
            if let Some(handling) = &mut *lock(&SIGNAL_ACTION) {
                handling.action.get_or_insert(action);
            }
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(listen).map_err(refused)?;
    *handling = Some(SignalAction { signals, action, launchers: Vec::new(), count: 0 });
    Ok(())
}

/// Turns signals into events until it is dropped.
#[derive(Debug)]
pub(super) struct SignalRelay {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
    /// Its number in [`SIGNAL_ACTION`], if [`on_signal`] was called.
    number: Option<usize>,
}

impl SignalRelay {
    pub(super) fn start(events: &Sender<Event>) -> Result<Self> {
        Self::try_start(events.clone()).map_err(|e| Error::system("cannot listen for signals", e))
    }

    fn try_start(events: Sender<Event>) -> std::io::Result<Self> {
        let mut running = lock(&RUNNING);
        let mut handling = lock(&SIGNAL_ACTION);
        let acted_on = handling.as_ref().map(|handling| handling.signals.clone()).unwrap_or_default();
        let ignored = Mask::ignored();
        let is_ours = |signal: &i32| !ignored.has(*signal) && !acted_on.contains(signal);
        if running.is_none() {
            // A handler stays installed once it was: from now on this process itself performs the default action. A
            // signal that the program handles itself is left to that handler.
            let handled = Mask::handled();
            for signal in FORWARDED_SIGNALS.into_iter().filter(is_ours).filter(|&s| !handled.has(s)) {
                signal_hook::flag::register_conditional_default(signal, &IDLE)?;
            }
            *running = Some(0);
        }
        // Under `nohup` and the like a signal stays ignored. But if SIGCHLD is ignored, exit statuses are lost, so it
        // gets a handler.
        let mut wanted: Vec<i32> = FORWARDED_SIGNALS.into_iter().filter(is_ours).collect();
        wanted.extend(ignored.has(SIGCHLD).then_some(SIGCHLD));
        let mut signals = Signals::new(wanted)?;
        let handle = signals.handle();
        let to_launcher = events.clone();
        let relay = move || {
            // The mask is this thread's own, so the process is as it was when the thread has ended.
            unblock(&FORWARDED_SIGNALS);
            for signal in signals.forever().filter(|&signal| signal != SIGCHLD) {
                // The receiver is gone if the launcher is about to return.
                let _ = events.send(event(signal));
            }
        };
        let thread = std::thread::Builder::new().name("signals".into()).spawn(relay)?;
        *running = running.map(|count| count + 1);
        IDLE.store(false, Ordering::SeqCst);
        let number = handling.as_mut().map(|handling| {
            handling.count += 1;
            handling.launchers.push((handling.count, to_launcher));
            handling.count
        });
        Ok(Self { handle, thread: Some(thread), number })
    }
}

impl Drop for SignalRelay {
    fn drop(&mut self) {
        if let (Some(own), Some(handling)) = (self.number, &mut *lock(&SIGNAL_ACTION)) {
            handling.launchers.retain(|(number, _)| *number != own);
        }
        let mut running = lock(&RUNNING);
        *running = running.map(|count| count.saturating_sub(1));
        IDLE.store(*running == Some(0), Ordering::SeqCst);
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            // `join` fails only if the thread panicked, and then it has ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_signal_is_the_same_wish_for_a_second() {
        let first = StopSignal::new(SIGTERM);
        assert!(first.is_repeated_by(SIGTERM) && !first.is_repeated_by(SIGINT));
        let Some(at) = Instant::now().checked_sub(REPEAT_TIME) else { return };
        assert!(!StopSignal { at, ..first }.is_repeated_by(SIGTERM));
    }
}
