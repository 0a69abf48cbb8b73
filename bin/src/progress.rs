//! A bar that shows how far training is, where somebody may look at it.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Nothing is shown of a run that is over before this: a flash would tell nobody anything.
const QUIET: Duration = Duration::from_millis(300);
/// Steps between two looks at the clock.
const EVERY: usize = 16;
const TEMPLATE: &str = "{bar:30} {percent:>3} %  step {pos} of {len}, {eta} left";

/// Progress of one run, on standard error, if that is a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    began: Instant,
    steps: usize,
}

impl Progress {
    pub(crate) fn new(total: usize) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::hidden());
            // The template is known to be good; a bar of another style would do as well.
            ProgressStyle::with_template(TEMPLATE).map_or(bar.clone(), |style| bar.with_style(style))
        });
        Self { bar, began: Instant::now(), steps: 0 }
    }

    /// So many steps were taken before.
    pub(crate) fn resume(&mut self, steps: usize) {
        self.steps = steps;
    }

    /// One step more. A few nanoseconds, most times.
    pub(crate) fn step(&mut self) {
        self.steps += 1;
        let Some(bar) = &self.bar else { return };
        if !self.steps.is_multiple_of(EVERY) {
            return;
        }
        if bar.is_hidden() && self.began.elapsed() > QUIET {
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(10));
        }
        bar.set_position(self.steps as u64);
    }

    /// Does something that prints, with the bar out of its way.
    pub(crate) fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
