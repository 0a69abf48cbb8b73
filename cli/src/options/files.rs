//! Checks of input and output files named by options, before any work is done.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use report::metrics::MetricsWriter;
use training::FileError;

use crate::error::{Error, Result};
use crate::options::CommonOptions;
use crate::outputs::{check_in_place, file_identity};

impl CommonOptions {
    /// Checks that all input files can be opened and all output files be written, and that none overwrites another one or
    /// an input.
    ///
    /// # Errors
    /// The first option whose file cannot be used.
    pub fn check_files(&self) -> Result<()> {
        let (inputs, outputs) = (self.inputs(), self.outputs());
        let mut seen: Vec<(&str, PathBuf)> = Vec::new();
        for (option, path) in inputs.into_iter().chain(outputs) {
            let Some(place) = path.as_deref().and_then(file_identity) else { continue };
            let is_input = inputs.iter().any(|(input, _)| *input == option);
            if let Some((other, _)) = seen.iter().find(|(_, taken)| *taken == place).filter(|_| !is_input) {
                // Saving weights to the file they came from is allowed.
                if (*other, option) != ("--init", "--save") {
                    return Err(Error::SameFile { option, other: other.to_string(), path: place });
                }
            }
            seen.push((option, place));
        }
        inputs.into_iter().filter_map(|(_, path)| path.as_deref()).try_for_each(check_input)?;
        for path in [&self.metrics, &self.trace, &self.report].into_iter().flatten() {
            check_in_place(path)?;
        }
        Ok(self.save.as_deref().map_or(Ok(()), training::internal::check_writable)?)
    }

    /// Checks that no other run is writing the file of `--metrics`.
    ///
    /// # Errors
    /// One is.
    pub(crate) fn check_metrics_are_free(&self) -> Result<()> {
        let Some(path) = &self.metrics else { return Ok(()) };
        // A run that was killed has the file until the system has ended its processes.
        let until = Instant::now() + Duration::from_secs(1);
        while MetricsWriter::is_in_use(path) {
            if Instant::now() > until {
                let help = "another run is writing it; give another file".into();
                return Err(Error::Option { option: "--metrics", got: path.display().to_string(), help });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Does the same check for one more output file of an experiment.
    ///
    /// # Errors
    /// It cannot.
    pub fn check_output(&self, option: &'static str, path: &Path) -> Result<()> {
        let found = file_identity(path);
        for (other, path) in self.inputs().into_iter().chain(self.outputs()) {
            if let (Some(found), true) = (&found, path.as_deref().and_then(file_identity) == found) {
                return Err(Error::SameFile { option, other: other.to_string(), path: found.clone() });
            }
        }
        Ok(check_in_place(path)?)
    }

    /// Checks that no output file is this input.
    ///
    /// # Errors
    /// It is.
    pub(crate) fn refuse_as_output(&self, input: &str, path: &Path) -> Result<()> {
        let Some(place) = file_identity(path) else { return Ok(()) };
        let is_it = |path: &Option<PathBuf>| path.as_deref().and_then(file_identity).as_ref() == Some(&place);
        match self.outputs().into_iter().find(|(_, path)| is_it(path)) {
            Some((option, _)) => Err(Error::SameFile { option, other: input.into(), path: place }),
            None => Ok(()),
        }
    }

    fn inputs(&self) -> [(&'static str, &Option<PathBuf>); 2] {
        [("--data", &self.data), ("--init", &self.init)]
    }

    /// Returns the options that name output files, with their values.
    pub fn outputs(&self) -> [(&'static str, &Option<PathBuf>); 4] {
        [
            ("--metrics", &self.metrics),
            ("--trace", &self.trace),
            ("--report", &self.report),
            ("--save", &self.save),
        ]
    }
}

/// Checks that an input file can be opened, before this process waits for others.
///
/// # Errors
/// It cannot, or is no regular file.
pub(crate) fn check_input(path: &Path) -> Result<()> {
    Ok(training::internal::open_input(path).map(drop).map_err(|error| FileError::read(path, error))?)
}

/// Reads a UTF-8 text file.
///
/// # Errors
/// A file that cannot be read, or is not text in UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let bytes = training::internal::read_input(path).map_err(|error| FileError::read(path, error))?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let problem = format!("it is no text in UTF-8 from byte {} on", error.utf8_error().valid_up_to());
        FileError::read(path, problem)
    });
    Ok(text?)
}
