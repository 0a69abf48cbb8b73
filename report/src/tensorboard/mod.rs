//! TensorBoard event files.
//!
//! A file is a sequence of records (TFRecord): length, its checksum, data, their checksum. Each record is an `Event` of
//! `tensorboard/compat/proto/event.proto`, of which a few fields are written here.

mod event;
mod record;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::{Error, Result};

/// Prefix of event file names; the number that follows determines their order.
const PREFIX: &str = "events.out.tfevents.";

/// An event file. Each record is written immediately in one call: a run that is killed leaves at most one incomplete
/// record at the end, which TensorBoard ignores.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Creates a file for a run that starts at `first_step`. Of earlier files in the folder, TensorBoard then shows
    /// only the steps before it.
    ///
    /// # Errors
    /// [`Error::Write`] with the path and the system's reason.
    ///
    /// ```
    /// use report::tensorboard::EventWriter;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let mut events = EventWriter::create(folder.path(), 1)?;
    /// events.scalars(1, &[("train/loss", 4.67), ("train/learning_rate", 0.001)])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn create(dir: &Path, first_step: usize) -> Result<Self> {
        let refuse = |error| Error::write(dir, error);
        fs::create_dir_all(dir).map_err(refuse)?;
        // Higher than all existing numbers, even if two runs start within one second.
        let mut number = seconds() as u64;
        for entry in fs::read_dir(dir).map_err(refuse)? {
            let name = entry.map_err(refuse)?.file_name();
            let earlier = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.get(..10)?.parse().ok());
            number = number.max(earlier.map_or(0, |earlier: u64| earlier + 1));
        }
        let host = rustix::system::uname().nodename().to_string_lossy().replace('/', "-");
        let path = dir.join(format!("{PREFIX}{number:010}.{host}.{}", std::process::id()));
        let file = File::options().append(true).create(true).open(&path);
        let file = file.map_err(|error| Error::write(&path, error))?;
        let mut events = Self { path, file };
        events.write(&event::version(seconds()))?;
        events.write(&event::begin(seconds(), first_step as u64))?;
        Ok(events)
    }

    /// Writes the values of some quantities after a step.
    ///
    /// # Errors
    /// [`Error::Write`], for instance if the disk is full.
    pub fn scalars(&mut self, step: usize, scalars: &[(&str, f64)]) -> Result<()> {
        self.write(&event::scalars(seconds(), step as u64, scalars))
    }

    fn write(&mut self, event: &[u8]) -> Result<()> {
        let written = self.file.write_all(&record::of(event));
        written.map_err(|error| Error::write(&self.path, error))
    }
}

/// Returns the time in seconds since 1970.
fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
