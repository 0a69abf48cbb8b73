//! Log files of the ranks' output.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use comm::{Error, Result};

/// Where the ranks' output is logged, and which streams are forwarded as well. If a file can no longer be written, for
/// example on a full disk, the ranks continue, the output is forwarded instead, and [`spawn`](super::spawn) returns the
/// reason at the end.
///
/// A rank's files are `DIR/RUN/attempt_N/RANK/stdout.log` and `stderr.log`, where N counts restarts and RUN is the
/// first eight characters of `TORCHELASTIC_RUN_ID`: no run overwrites another's.
#[derive(Debug, Clone, Default)]
pub struct LogConfig {
    /// The folder; created if it does not exist.
    pub dir: PathBuf,
    /// Whether standard output is forwarded, too. Default: false.
    pub show_stdout: bool,
    /// Whether standard error is forwarded, too. Default: false.
    pub show_stderr: bool,
}

/// One of a rank's two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Out,
    Err,
}

impl LogConfig {
    pub(super) fn shows(&self, stream: Stream) -> bool {
        match stream {
            Stream::Out => self.show_stdout,
            Stream::Err => self.show_stderr,
        }
    }

    fn unusable(path: &Path, reason: &std::io::Error) -> Error {
        Error::invalid(
            "log_dir",
            path.display(),
            format!("it cannot be written: {reason}; give another folder"),
        )
    }

    /// Creates the folder, before anything is started.
    pub(super) fn check(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(|reason| Self::unusable(&self.dir, &reason))
    }

    /// Returns a run's folder within `dir`.
    pub(super) fn run_dir(&self, run_id: &str) -> PathBuf {
        self.dir.join(run_id.get(..8).unwrap_or(run_id))
    }

    /// Creates the log file of one rank's stream.
    pub(super) fn open(&self, run_id: &str, restart: usize, rank: usize, stream: Stream) -> Result<LogFile> {
        let folder = self.run_dir(run_id).join(format!("attempt_{restart}")).join(rank.to_string());
        let path = folder.join(match stream {
            Stream::Out => "stdout.log",
            Stream::Err => "stderr.log",
        });
        let file = fs::create_dir_all(&folder).and_then(|()| File::create(&path));
        let file = file.map_err(|reason| Self::unusable(&path, &reason))?;
        Ok(LogFile { path, file: Some(file), lost: None })
    }
}

/// Log file of one stream.
#[derive(Debug)]
pub(super) struct LogFile {
    path: PathBuf,
    /// `None` once writing has failed.
    file: Option<File>,
    /// The write error, until it is taken.
    lost: Option<Error>,
}

impl LogFile {
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns false if the text was not written and has to be output elsewhere.
    pub(super) fn write(&mut self, text: &[u8]) -> bool {
        let Some(file) = &mut self.file else { return false };
        let Err(reason) = file.write_all(text) else { return true };
        // A failed log does not end the job.
        self.file = None;
        let path = self.path.display();
        tracing::warn!(
            "{path}: it cannot be written any more: {reason}; what comes after is shown in its place"
        );
        let what = format!("{path} does not have all that a rank has printed");
        self.lost = Some(Error::system(what, format!("{reason}; the rest was shown")));
        false
    }

    /// Takes the error that made the log incomplete, if any.
    pub(super) fn lost(&mut self) -> Option<Error> {
        self.lost.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_and_attempt_has_its_own_files() {
        let folder = tempfile::tempdir().unwrap();
        let logs = LogConfig { dir: folder.path().join("a/b"), ..LogConfig::default() };
        logs.check().unwrap();
        let mut file = logs.open("0123456789abcdef", 2, 7, Stream::Err).unwrap();
        assert!(file.write(b"one\n") && file.write(b"two\n"));
        let path = folder.path().join("a/b/01234567/attempt_2/7/stderr.log");
        assert_eq!(fs::read_to_string(path).unwrap(), "one\ntwo\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_cannot_be_written_is_told_once() {
        let file = File::options().write(true).open("/dev/full").unwrap();
        let mut file = LogFile { path: "a/stdout.log".into(), file: Some(file), lost: None };
        assert!(!file.write(b"one\n") && !file.write(b"two\n"));
        let lost = file.lost().unwrap().to_string();
        assert!(
            lost.starts_with("a/stdout.log does not have all that a rank has printed: No space left"),
            "{lost}"
        );
        assert!(file.lost().is_none());
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("file");
        fs::write(&dir, "").unwrap();
        let message = LogConfig { dir: dir.clone(), ..LogConfig::default() }.check().unwrap_err().to_string();
        assert!(
            message.starts_with(&format!("log_dir: got {}; it cannot be written", dir.display())),
            "{message}"
        );
    }
}
