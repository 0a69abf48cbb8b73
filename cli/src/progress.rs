//! Training progress bar on a terminal.
//!
//! A process whose standard error is a terminal draws the bar there. A rank sends its progress to its launcher, which
//! draws the bar if its own standard error is a terminal.

use std::io::{IsTerminal, stderr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use console::Term;
use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use launch::{Notes, send_note, wants_notes};
use training::internal::lock;

/// Delay before the bar first appears; a run that ends sooner shows none, since a flash would be unreadable.
const SHOW_DELAY: Duration = Duration::from_millis(300);
/// Minimum interval between updates of the bar.
const PERIOD: Duration = Duration::from_millis(100);
/// The maximum and the minimum length of the bar, in columns; with less space only text is shown.
const BAR_WIDTHS: (usize, usize) = (30, 4);
/// The note that a rank sends when its run is over.
const END: &str = "end";

/// Progress of one run, and where it is shown.
#[derive(Debug)]
pub struct Progress {
    shown: Display,
    unit: Unit,
    total: usize,
    steps: usize,
    next: Instant,
    /// Tokens per second: exponential moving average over steps; `None` if never set.
    speed: Option<f64>,
}

/// A bar, and the tokens per second it shows; 0 for none.
#[derive(Debug, Clone)]
struct Bar {
    bar: ProgressBar,
    speed: Arc<AtomicU64>,
}

impl Bar {
    /// Creates a bar at position `done`, and passes it to `keep` before it is drawn; the remaining time is estimated from
    /// here on.
    fn new(unit: Unit, done: u64, total: u64, keep: impl FnOnce(&ProgressBar)) -> Self {
        let speed: Arc<AtomicU64> = Arc::default();
        let bar = new_bar(unit, total, speed.clone());
        keep(&bar);
        bar.set_position(done);
        bar.reset_eta();
        Self { bar, speed }
    }

    fn set(&self, done: u64, speed: Option<u64>) {
        self.speed.store(speed.unwrap_or(0), Ordering::Relaxed);
        self.bar.set_position(done);
    }
}

/// The unit that progress is counted in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    Steps,
    Megabytes,
}

impl Unit {
    fn say(self, done: u64, total: u64) -> String {
        match self {
            Self::Steps => format!("step {done} of {total}"),
            Self::Megabytes => format!("{done} of {total} MB"),
        }
    }
}

#[derive(Debug)]
enum Display {
    Nowhere,
    Here(Option<Bar>),
    /// In the launcher's bar; true once a note has been sent to it.
    ByLauncher(bool),
}

impl Progress {
    pub(crate) fn new(total: usize) -> Self {
        let shown = match (wants_notes(), stderr().is_terminal()) {
            (true, _) => Display::ByLauncher(false),
            (false, true) => Display::Here(None),
            (false, false) => Display::Nowhere,
        };
        Self { shown, unit: Unit::Steps, total, steps: 0, next: Instant::now() + SHOW_DELAY, speed: None }
    }

    /// Progress of a process that reads `total` megabytes.
    pub(crate) fn of_megabytes(total: usize) -> Self {
        let mut progress = Self::new(total);
        progress.unit = Unit::Megabytes;
        progress
    }

    /// Progress of a run that another process shows.
    pub(crate) fn nowhere() -> Self {
        Self {
            shown: Display::Nowhere,
            unit: Unit::Steps,
            total: 0,
            steps: 0,
            next: Instant::now(),
            speed: None,
        }
    }

    /// Sets the number of steps taken before this process started.
    pub(crate) fn resume(&mut self, steps: usize) {
        self.steps = steps;
    }

    /// Updates the moving average with the latest step's tokens per second.
    pub(crate) fn speed(&mut self, tokens_per_second: f64) {
        let before = self.speed.unwrap_or(tokens_per_second);
        self.speed = Some(0.9 * before + 0.1 * tokens_per_second).filter(|speed| speed.is_finite());
    }

    /// Counts one more step. Cheap: an addition if nothing is shown, otherwise usually one reading of the clock.
    pub(crate) fn step(&mut self) {
        self.set_done(self.steps + 1);
    }

    /// Sets the number of completed steps.
    pub(crate) fn set_done(&mut self, steps: usize) {
        self.steps = steps;
        if matches!(self.shown, Display::Nowhere) {
            return;
        }
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + PERIOD;
        let speed = self.speed.map(|speed| speed as u64);
        match &mut self.shown {
            Display::Nowhere => {}
            Display::Here(bar) => {
                // A signal that comes as soon as it is drawn erases it.
                let keep = |bar: &ProgressBar| {
                    *lock(&BAR) = Some(bar.clone());
                };
                let begin = || Bar::new(self.unit, self.steps as u64, self.total as u64, keep);
                bar.get_or_insert_with(begin).set(self.steps as u64, speed);
            }
            Display::ByLauncher(is_sent) => {
                *is_sent = true;
                let speed = speed.map(|speed| format!(" {speed}")).unwrap_or_default();
                send_note(&format!("{} {}{speed}", self.steps, self.total));
            }
        }
    }

    /// Runs `print` while this run's bar is hidden.
    pub(crate) fn with_bar_hidden<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.shown {
            Display::Here(Some(bar)) => bar.bar.suspend(print),
            _ => print(),
        }
    }
}

/// The bar of this process, while it is shown.
static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Runs `print` while this process's bar, if any, is hidden.
pub(crate) fn aside<T>(print: impl FnOnce() -> T) -> T {
    let bar = lock(&BAR).clone();
    match bar {
        Some(bar) => bar.suspend(print),
        None => print(),
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        match &self.shown {
            Display::Here(Some(bar)) => {
                *lock(&BAR) = None;
                bar.bar.finish_and_clear();
            }
            Display::ByLauncher(true) => send_note(END),
            _ => {}
        }
    }
}

fn new_bar(unit: Unit, total: u64, speed: Arc<AtomicU64>) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr_with_hz(10));
    // The template is constant and valid; on an error, a bar in the default style will do.
    let Ok(style) = ProgressStyle::with_template("{line}") else { return bar };
    bar.with_style(style.with_key("line", move |state: &ProgressState, to: &mut dyn std::fmt::Write| {
        // Read on each redraw: the terminal may have been resized.
        let (_, columns) = Term::stderr().size();
        // No estimate exists before the second step.
        let left =
            Some(state.eta()).filter(|left| !left.is_zero() || state.pos() == state.len().unwrap_or(0));
        let left = left.map(|left| format!("{:#}", HumanDuration(left)));
        let words = unit.say(state.pos(), state.len().unwrap_or(0));
        let speed = Some(speed.load(Ordering::Relaxed)).filter(|speed| *speed > 0);
        let (done, total) = (state.pos(), state.len().unwrap_or(0));
        let line = line(usize::from(columns), done, total, &words, speed, left.as_deref());
        // Writing to memory cannot fail.
        let _ = to.write_str(&line);
    }))
}

/// Returns the bar's text for a terminal of `columns` columns; always shorter than that, since a wrapped line could
/// not be erased.
fn line(
    columns: usize,
    done: u64,
    total: u64,
    words: &str,
    speed: Option<u64>,
    left: Option<&str>,
) -> String {
    let part = |whole: u64| whole * done.min(total) / total.max(1);
    let percent = format!("{:>3} %", part(100));
    let left = left.map_or_else(String::new, |left| format!(", {left} left"));
    let fast = speed.map(|speed| format!("{percent}  {words}, {speed} tokens/s{left}"));
    let texts = [format!("{percent}  {words}{left}"), format!("{percent}  {words}"), percent];
    // Some terminals wrap as soon as the last column is written.
    let room = columns.saturating_sub(1);
    let text = fast.into_iter().chain(texts).find(|text| text.len() <= room).unwrap_or_default();
    let bar = room.saturating_sub(text.len() + 1).min(BAR_WIDTHS.0);
    if bar < BAR_WIDTHS.1 {
        return text;
    }
    let full = part(bar as u64) as usize;
    format!("{}{} {text}", "█".repeat(full), "░".repeat(bar - full))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_fits_every_terminal() {
        for (columns, expected) in [
            (200, "███████████████░░░░░░░░░░░░░░░  50 %  step 15000 of 30000, 12s left"),
            (54, "████████░░░░░░░░  50 %  step 15000 of 30000, 12s left"),
            (40, " 50 %  step 15000 of 30000, 12s left"),
            (36, "████░░░░  50 %  step 15000 of 30000"),
            (30, " 50 %  step 15000 of 30000"),
            (20, "██████░░░░░░░  50 %"),
            (6, " 50 %"),
            (5, ""),
            (0, ""),
        ] {
            let line = line(columns, 15_000, 30_000, &Unit::Steps.say(15_000, 30_000), None, Some("12s"));
            assert_eq!(line, expected);
            assert!(line.is_empty() || line.chars().count() < columns, "{columns}");
        }
        assert!(line(54, 1, 30, "step 1 of 30", Some(34), None).ends_with("step 1 of 30, 34 tokens/s"));
        for (at, expected) in [((0, 0), "░░░░   0 %"), ((7, 5), "████ 100 %")] {
            assert_eq!(line(11, at.0, at.1, &Unit::Megabytes.say(at.0, at.1), None, Some("0s")), expected);
        }
        for (columns, expected) in
            [(54, " 50 %  step 1 of 2, 3400 tokens/s, 12s left"), (40, " 50 %  step 1 of 2, 12s left")]
        {
            let line = line(columns, 1, 2, &Unit::Steps.say(1, 2), Some(3400), Some("12s"));
            assert!(line.ends_with(expected) && line.chars().count() < columns, "{line}");
        }
    }
}

/// The bar that a launcher draws from its ranks' notes.
#[derive(Debug, Default)]
pub(crate) struct RanksBar(Mutex<Option<Bar>>);

impl RanksBar {
    /// Returns a bar if standard error is a terminal.
    pub(crate) fn on_terminal() -> Option<Arc<Self>> {
        stderr().is_terminal().then(Arc::default)
    }

    /// Removes the bar, once no rank is left.
    pub(crate) fn clear(&self) {
        if let Some(bar) = lock(&self.0).take() {
            bar.bar.finish_and_clear();
        }
    }
}

impl Notes for RanksBar {
    fn note(&self, _: usize, text: &str) {
        if text == END {
            return self.clear();
        }
        let numbers: Vec<Option<u64>> = text.split(' ').map(|number| number.parse().ok()).collect();
        // Other notes of a program are not for this bar.
        let (steps, total, speed) = match numbers[..] {
            [Some(steps), Some(total)] => (steps, total, None),
            [Some(steps), Some(total), Some(speed)] => (steps, total, Some(speed)),
            _ => return,
        };
        let mut bar = lock(&self.0);
        bar.get_or_insert_with(|| Bar::new(Unit::Steps, steps, total, |_| {})).set(steps, speed);
    }

    fn aside(&self, write: &mut dyn FnMut()) {
        let bar = lock(&self.0).clone();
        match bar {
            Some(bar) => bar.bar.suspend(write),
            None => write(),
        }
    }
}
