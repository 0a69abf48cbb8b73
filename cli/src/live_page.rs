//! The page of `--report` while the run goes on.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use report::{Report, RunSeries, RunState, command_line, now_rfc3339};

use crate::console::note;
use crate::option_values;
use training::internal::lock;

/// How often it is written, besides after each evaluation.
const EVERY: Duration = Duration::from_secs(30);

/// The page that this process has written of a run that goes on.
static RUNNING: Mutex<Option<PathBuf>> = Mutex::new(None);

fn set_running(path: Option<&Path>) {
    *lock(&RUNNING) = path.map(Into::into);
}

/// Makes the page of a run that goes on say that it has ended early, as a signal ends this process.
pub(crate) fn stop_on_signal() {
    let path = lock(&RUNNING).take();
    // A file that cannot be written is no reason to go on.
    let _ = path.map(|path| report::mark_stopped(&path));
}

/// Makes the page of a run say that it has ended early, if a rank that was killed has left it saying that it goes on.
pub(crate) fn stop_after_loss(path: &Path) {
    if path.metadata().is_ok_and(|found| found.is_file())
        && let Err(error) = report::mark_stopped(path)
    {
        note(format_args!("{error}"));
    }
}

/// A page that is written again and again. If the run fails, its last form says that it has ended early.
#[derive(Debug)]
pub struct LivePage {
    path: PathBuf,
    report: Report,
    /// What is known of the run from its start.
    run: RunSeries,
    written: Instant,
    is_finished: bool,
}

impl LivePage {
    /// Returns the page of a command's run, of which `run` has what is known from its start. `None` without a path, the value
    /// of `--report`, or if that is a device or pipe, to which only the last form is written.
    pub fn new(command: &str, path: Option<&Path>, run: RunSeries) -> Option<Self> {
        let path = path?.to_path_buf();
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            return None;
        }
        let report = Report {
            title: command.into(),
            command_line: command_line(),
            host: comm::internal::host_name(),
            options: option_values::all(),
            state: RunState::Running,
            ..Report::default()
        };
        Some(Self { path, report, run, written: Instant::now(), is_finished: false })
    }

    /// Whether it is time to write it again.
    pub(crate) fn is_due(&self) -> bool {
        self.written.elapsed() >= EVERY
    }

    /// Writes it with the run so far. If that fails, the run goes on without.
    pub(crate) fn write(&mut self, so_far: RunSeries) {
        let RunSeries { name, world_size, steps_per_epoch, .. } = self.run.clone();
        self.report.runs = vec![RunSeries { name, world_size, steps_per_epoch, ..so_far }];
        self.write_state();
    }

    fn write_state(&mut self) {
        self.report.date = now_rfc3339();
        set_running(Some(&self.path).filter(|_| self.report.state == RunState::Running).map(|path| &**path));
        if let Err(error) = self.report.write(&self.path) {
            note(format_args!("{error}; the page of --report is written at the end only"));
            self.is_finished = true;
        }
        self.written = Instant::now();
    }

    /// Leaves it to the launcher or the first rank, which write its last form.
    pub(crate) fn finish(&mut self) {
        self.is_finished = true;
        set_running(None);
    }
}

impl Drop for LivePage {
    fn drop(&mut self) {
        if !self.is_finished && !self.report.runs.is_empty() {
            self.report.state = RunState::Stopped;
            self.write_state();
        }
    }
}

#[cfg(test)]
mod tests {
    use report::Evaluation;
    use report::metrics::StepDetails;

    use super::*;
    use crate::run_log::{LogConfig, RunLog};

    fn details(learning_rate: f64) -> StepDetails {
        StepDetails {
            learning_rate,
            grad_norm: 1.0,
            tokens_per_second: 10.0,
            loss_scale: None,
            balance_loss: None,
            busiest_expert: None,
            pairs: None,
            speed: None,
        }
    }

    #[test]
    fn the_page_is_written_at_evaluations_and_says_how_far_the_run_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.html");
        let page = || std::fs::read_to_string(&path).unwrap();
        let log = |muted| {
            let run = RunSeries { name: "dp=1".into(), world_size: 1, ..RunSeries::default() };
            let config = LogConfig { keep: true, muted, ..LogConfig::default() };
            RunLog::new(&config, None).with_page(LivePage::new("pretrain", Some(&path), run))
        };
        let step_and_evaluate = |log: &mut RunLog<'_>| {
            log.step_with(0, 0, 3.0, &details(0.5)).unwrap();
            log.evaluated(Evaluation { step: 1, loss: 2.0, sample: None, ..Evaluation::default() }).unwrap();
        };
        let mut muted = log(true);
        step_and_evaluate(&mut muted);
        drop(muted);
        assert!(!path.exists());
        let mut ended = log(false);
        ended.step_with(0, 0, 3.0, &details(0.5)).unwrap();
        assert!(!path.exists());
        step_and_evaluate(&mut ended);
        let running = page();
        assert!(running.contains("data-reload") && running.contains("Learning rate"), "{running}");
        ended.finish();
        assert_eq!(page(), running, "the whole run's page is written by others");
        let mut failed = log(false);
        step_and_evaluate(&mut failed);
        drop(failed);
        assert!(page().contains("ended before its last step") && !page().contains("data-reload"));
    }

    #[test]
    fn devices_get_the_last_form_only() {
        assert!(LivePage::new("pretrain", Some(Path::new("/dev/null")), RunSeries::default()).is_none());
        assert!(LivePage::new("pretrain", None, RunSeries::default()).is_none());
    }
}
