//! Metrics files: one JSON object per line for each step, and one for the whole run: `--metrics FILE.jsonl`.

mod earlier;
mod held;
mod speed;

use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::{Error, Evaluation, PairMetrics, Result, RoutedTokens};

use earlier::PreservedLines;

pub use held::MemoryUse;
pub use speed::{CheckpointTimes, StepSpeed};

/// The last line of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Summary<'a> {
    /// Name of the run within the experiment, if that has several (`single`, `ddp`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<&'a str>,
    /// Time of the training loop alone, in seconds; of all its parts, if the run was resumed from a checkpoint.
    pub seconds: f64,
    /// Number of ranks.
    pub world_size: usize,
    /// Peak memory of each rank, in bytes, by rank; left out if unknown.
    #[serde(skip_serializing_if = "<[u64]>::is_empty")]
    pub peak_rss_bytes: &'a [u64],
    /// Memory of the model by kind, and bytes sent in a step, by rank; left out if not measured.
    #[serde(skip_serializing_if = "<[MemoryUse]>::is_empty")]
    pub held: &'a [MemoryUse],
    /// Times of checkpoints, if some were written and measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoints: Option<CheckpointTimes>,
    /// What became of documents that are packed whole, if any are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub packing: Option<PackedDocuments>,
}

/// What became of documents that are packed whole into rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct PackedDocuments {
    /// Number of documents.
    pub documents: u64,
    /// Number of those that were longer than a row, and were cut.
    pub cut: u64,
    /// Number of those that were longer than a row, and were left out.
    pub dropped: u64,
    /// Share of the places of an epoch's rows that are unused, from 0 to 1.
    pub padding: f64,
}

/// What a step line contains in addition to the loss.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepDetails {
    /// The learning rate.
    pub learning_rate: f64,
    /// Norm of the gradients before clipping; `null` if it is not finite.
    pub grad_norm: f64,
    /// Targets of all ranks, divided by the time since the previous step.
    pub tokens_per_second: f64,
    /// Factor of the loss in backward, if losses are scaled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<f64>,
    /// Loss that balances experts, with its coefficient, which is not a part of the loss; left out without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_loss: Option<f64>,
    /// Of the router with the least balanced experts, the share of the busiest one in all choices; left out without experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub busiest_expert: Option<f64>,
    /// What was found of pairs of answers, in training on preferences.
    #[serde(flatten)]
    pub pairs: Option<PairMetrics>,
    /// Speed of the step, if measured.
    #[serde(flatten)]
    pub speed: Option<StepSpeed>,
}

impl StepDetails {
    /// What the page of a run draws: names and values.
    pub fn quantities(&self) -> Vec<(&'static str, f64)> {
        let of_speed = self.speed.map(|speed| ("MFU (%)", speed.mfu.map_or(f64::NAN, |mfu| 100.0 * mfu)));
        let own = [
            ("Learning rate", self.learning_rate),
            ("Gradient norm", self.grad_norm),
            ("Tokens per second", self.tokens_per_second),
        ];
        let balance = self.balance_loss.map(|loss| ("Balance loss", loss));
        let busiest = self.busiest_expert.map(|share| ("Busiest expert (%)", 100.0 * share));
        let pairs = self.pairs.iter().flat_map(PairMetrics::quantities);
        own.into_iter().chain(of_speed).chain(balance).chain(busiest).chain(pairs).collect()
    }
}

#[derive(Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
enum Line<'a> {
    Step {
        #[serde(skip_serializing_if = "Option::is_none")]
        run: Option<&'a str>,
        epoch: usize,
        batch: usize,
        /// The shortest decimal that reads back as the same f32; `null` if it is not finite.
        loss: f32,
        #[serde(flatten)]
        details: Option<&'a StepDetails>,
    },
    Evaluation {
        #[serde(skip_serializing_if = "Option::is_none")]
        run: Option<&'a str>,
        #[serde(flatten)]
        evaluation: &'a Evaluation,
    },
    Experts {
        #[serde(skip_serializing_if = "Option::is_none")]
        run: Option<&'a str>,
        #[serde(flatten)]
        routed: &'a RoutedTokens,
    },
    Summary(&'a Summary<'a>),
}

/// The fields that identify a line.
#[derive(Deserialize)]
struct LineKey {
    event: String,
    run: Option<String>,
    #[serde(default)]
    epoch: usize,
    #[serde(default)]
    batch: usize,
    #[serde(default)]
    step: usize,
}

/// Buffered lines are written once they have this many bytes. Small, because the kernel may cut a write of several
/// pages when it kills the writer.
const MAX_BUFFERED: usize = 4096;
/// Buffered lines are also written with the first line after this time, so that the file can be followed.
const MAX_DELAY: Duration = Duration::from_millis(250);

/// Writes the lines of `--metrics`.
///
/// Lines are buffered for a quarter of a second or 4 KiB (a step costs far less than a microsecond), and whole lines
/// are written: whatever ends the process, the file ends with a line. The rest is written by
/// [`MetricsWriter::summary`], or when the writer is dropped. A line that is cut off by a full disk is removed again.
///
/// A run writes directly to the file, so its lines can be followed, and remain if it is killed. Lines of an earlier run
/// in the file are kept until [`MetricsWriter::finish`]: see [`MetricsWriter::create`].
///
/// ```
/// use report::metrics::{MetricsWriter, Summary};
///
/// let path = std::env::temp_dir().join(format!("metrics-{}.jsonl", std::process::id()));
/// let mut metrics = MetricsWriter::create(&path)?;
/// metrics.step(Some("ddp"), 0, 0, 4.67, None)?;
/// metrics.summary(&Summary { run: Some("ddp"), seconds: 0.5, world_size: 2, ..Summary::default() })?;
/// let text = std::fs::read_to_string(&path)?;
/// assert!(text.starts_with(r#"{"event":"step","run":"ddp","epoch":0,"batch":0,"loss":4.67}"#));
/// # std::fs::remove_file(&path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct MetricsWriter {
    path: PathBuf,
    file: File,
    lines: Vec<u8>,
    written: Instant,
    earlier: Option<PreservedLines>,
}

impl MetricsWriter {
    /// Creates or empties the file. Call it before any work is done, so that a wrong path is noticed early.
    ///
    /// Lines of an earlier run are kept in `NAME.earlier` until [`finish`](Self::finish). If this writer is dropped
    /// without it, because the run has failed, they are restored if this run has written none. So neither a full disk
    /// nor a kill destroys them.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason; the file is then unchanged.
    pub fn create(path: &Path) -> Result<Self> {
        let refuse = |error| Error::write(path, error);
        let earlier = PreservedLines::keep(path).map_err(refuse)?;
        let new =
            training::internal::open_output(path, File::options().write(true).create(true).truncate(true));
        let file = new.map_err(refuse)?;
        Ok(Self::new(path, file, earlier))
    }

    fn new(path: &Path, file: File, earlier: Option<PreservedLines>) -> Self {
        if file.metadata().is_ok_and(|found| found.is_file()) {
            // All writers of a run hold it. Where there are no locks, a second run is not noticed.
            let _ = file.try_lock_shared();
        }
        let lines = Vec::with_capacity(2 * MAX_BUFFERED);
        Self { path: path.to_path_buf(), file, lines, written: Instant::now(), earlier }
    }

    /// Whether another run has a writer of this file: [`create`](Self::create) would take it away from that one.
    pub fn is_in_use(path: &Path) -> bool {
        let is_file = std::fs::metadata(path).is_ok_and(|found| found.is_file());
        let file = File::open(path).ok().filter(|_| is_file);
        file.is_some_and(|file| matches!(file.try_lock(), Err(std::fs::TryLockError::WouldBlock)))
    }

    /// Marks the run as successful: deletes the lines of an earlier run.
    pub fn finish(mut self) {
        if let Some(earlier) = self.earlier.take() {
            earlier.forget();
        }
    }

    /// Appends to a file that another process has begun.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason.
    pub fn append(path: &Path) -> Result<Self> {
        let file = training::internal::open_output(path, File::options().append(true).create(true));
        let file = file.map_err(|error| Error::write(path, error))?;
        Ok(Self::new(path, file, None))
    }

    /// Writes all buffered lines.
    ///
    /// # Errors
    /// [`Error::Write`], for instance if the disk is full.
    pub fn flush(&mut self) -> Result<()> {
        self.written = Instant::now();
        let result = self.write_lines();
        // Also after an error: lines that may have been written in part must not be written again.
        self.lines.clear();
        result.map_err(|error| Error::write(&self.path, error))
    }

    fn write_lines(&mut self) -> std::io::Result<()> {
        let mut done = 0;
        while done < self.lines.len() {
            let error = match self.file.write(&self.lines[done..]) {
                Ok(0) => ErrorKind::WriteZero.into(),
                Ok(count) => {
                    done += count;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => error,
            };
            // Removes the incomplete line, so that the file ends with a whole one.
            let whole = self.lines[..done].iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
            let found = self.file.metadata()?;
            if found.is_file() {
                self.file.set_len(found.len().saturating_sub((done - whole) as u64))?;
            }
            return Err(error);
        }
        Ok(())
    }

    /// Appends a step, with further details if there are any; `run` names the run within the experiment, if that has several.
    ///
    /// # Errors
    /// [`Error::Write`], for instance if the disk is full.
    pub fn step(
        &mut self,
        run: Option<&str>,
        epoch: usize,
        batch: usize,
        loss: f32,
        details: Option<&StepDetails>,
    ) -> Result<()> {
        self.line(&Line::Step { run, epoch, batch, loss, details })
    }

    /// Appends an evaluation of a run whose batches are counted over all epochs.
    ///
    /// # Errors
    /// [`Error::Write`], for instance if the disk is full.
    pub fn evaluation(&mut self, run: Option<&str>, evaluation: &Evaluation) -> Result<()> {
        self.line(&Line::Evaluation { run, evaluation })
    }

    /// Appends how many tokens each expert had in a step.
    ///
    /// # Errors
    /// [`Error::Write`], for instance if the disk is full.
    pub fn experts(&mut self, run: Option<&str>, routed: &RoutedTokens) -> Result<()> {
        self.line(&Line::Experts { run, routed })
    }

    /// Appends the summary of a run, and writes all buffered lines.
    ///
    /// # Errors
    /// [`Error::Write`], for instance if the disk is full.
    pub fn summary(&mut self, summary: &Summary<'_>) -> Result<()> {
        self.line(&Line::Summary(summary))?;
        self.flush()
    }

    /// Whether the file has this step of a run.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason.
    pub fn has(&mut self, run: Option<&str>, epoch: usize, batch: usize) -> Result<bool> {
        self.any(run, |line| line.event == "step" && (line.epoch, line.batch) == (epoch, batch))
    }

    /// Whether the file has the evaluation of a run after `step` steps.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason.
    pub fn has_evaluation(&mut self, run: Option<&str>, step: usize) -> Result<bool> {
        self.any(run, |line| line.event == "evaluation" && line.step == step)
    }

    /// Whether the file has the summary of a run.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason.
    pub fn has_summary(&mut self, run: Option<&str>) -> Result<bool> {
        self.any(run, |line| line.event == "summary")
    }

    fn any(&mut self, run: Option<&str>, is_it: impl Fn(&LineKey) -> bool) -> Result<bool> {
        self.flush()?;
        let refuse = |error| Error::write(&self.path, error);
        if !self.file.metadata().map_err(refuse)?.is_file() {
            return Ok(false);
        }
        let text = std::fs::read(&self.path).map_err(refuse)?;
        let is_it = |line: &[u8]| {
            serde_json::from_slice(line).is_ok_and(|line: LineKey| line.run.as_deref() == run && is_it(&line))
        };
        Ok(text.split(|&byte| byte == b'\n').rev().any(is_it))
    }

    /// Removes this run's steps from the given one on, later evaluations, its summary, and everything after the first
    /// line removed: for a run that resumes at that step. A device or pipe is left unchanged.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason.
    pub fn cut(&mut self, run: Option<&str>, epoch: usize, batch: usize) -> Result<()> {
        self.flush()?;
        let refuse = |error| Error::write(&self.path, error);
        if !self.file.metadata().map_err(refuse)?.is_file() {
            return Ok(());
        }
        let text = std::fs::read(&self.path).map_err(refuse)?;
        // An incomplete last line has no newline; and an earlier start that was killed may have left a part of a line, which
        // another start went on in.
        let is_foreign = |line: &[u8]| {
            let is_ours = line.starts_with(b"{\"event\":") || serde_json::from_slice::<LineKey>(line).is_ok();
            line.ends_with(b"\n") && !is_ours
        };
        if text.split_inclusive(|&byte| byte == b'\n').any(is_foreign) {
            let problem = "it has lines that are no metrics, which would be lost: give another file";
            return Err(Error::write(&self.path, problem));
        }
        let stays = |line: &[u8]| {
            let Ok(line) = serde_json::from_slice::<LineKey>(line) else { return false };
            let comes_before = match line.event.as_str() {
                "step" => (line.epoch, line.batch) < (epoch, batch),
                // After a step that stays.
                "evaluation" | "experts" => line.step <= batch,
                _ => false,
            };
            line.run.as_deref() != run || comes_before
        };
        // An incomplete last line has no newline, and is not valid JSON.
        let kept =
            text.split_inclusive(|&byte| byte == b'\n').take_while(|line| stays(line)).map(<[u8]>::len);
        self.file.set_len(kept.sum::<usize>() as u64).map_err(refuse)?;
        // Needed if the file was not opened for appending.
        self.file.seek(SeekFrom::End(0)).map(drop).map_err(refuse)
    }

    fn line(&mut self, line: &Line<'_>) -> Result<()> {
        let begun = self.lines.len();
        if let Err(error) = serde_json::to_writer(&mut self.lines, line) {
            self.lines.truncate(begun);
            return Err(Error::write(&self.path, error));
        }
        self.lines.push(b'\n');
        if self.lines.len() >= MAX_BUFFERED || self.written.elapsed() >= MAX_DELAY {
            self.flush()
        } else {
            Ok(())
        }
    }
}

impl Drop for MetricsWriter {
    fn drop(&mut self) {
        // Errors are ignored; call `flush` to get them.
        let _ = self.flush();
    }
}

#[cfg(test)]
mod tests;
