//! Output of the ranks' lines to this process's standard output or standard error.

use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use comm::launcher::lock;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, fstat};

/// A pipe that is ready for writing takes at least this many bytes without blocking.
const PIECE: usize = 4096;

/// The source pipe of the over-long line that a file is in the middle of, if any.
type UnfinishedLine = Arc<Mutex<Option<usize>>>;

/// A file to which lines are written, each by one write where the system allows it.
#[derive(Debug)]
pub(super) struct Sink {
    file: File,
    /// Maximum number of bytes of one write.
    piece: usize,
    unfinished: UnfinishedLine,
    /// Whether a last line without newline gets one.
    ends_last_line: bool,
    /// Hangs up when writing is to be abandoned.
    abandon: PipeReader,
}

impl Sink {
    /// Creates sinks for this process's standard output and standard error. The last line of standard error always gets
    /// a newline, since this process may print something after it; that of standard output only if `ends_output` is
    /// true, or if both are the same file.
    pub(super) fn standard(abandon: &PipeReader, ends_output: bool) -> io::Result<(Sink, Sink)> {
        // What the program itself has printed must come first.
        io::stdout().flush()?;
        let mut out = Sink::new(io::stdout().as_fd(), abandon)?;
        let err = Sink::new(io::stderr().as_fd(), abandon)?;
        // With `2>&1` both are one file; a line of one stream must not split a long line of the other.
        let (a, b) = (fstat(&out.file)?, fstat(&err.file)?);
        if (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) {
            out.unfinished = Arc::clone(&err.unfinished);
        } else {
            out.ends_last_line = ends_output;
        }
        Ok((out, err))
    }

    fn new(file: BorrowedFd<'_>, abandon: &PipeReader) -> io::Result<Self> {
        let file = File::from(file.try_clone_to_owned()?);
        let never_blocks = FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::RegularFile;
        let piece = if never_blocks { usize::MAX } else { PIECE };
        let (unfinished, abandon) = (UnfinishedLine::default(), abandon.try_clone()?);
        Ok(Self { file, piece, unfinished, ends_last_line: true, abandon })
    }

    /// Writes a piece of text that was read from the pipe `source`. If another pipe's line is unfinished, a newline is
    /// written first.
    pub(super) fn write(&mut self, source: usize, text: &[u8]) -> io::Result<()> {
        let unfinished = Arc::clone(&self.unfinished);
        let mut unfinished = lock(&unfinished);
        if unfinished.is_some_and(|begun| begun != source) {
            self.write_all(b"\n")?;
        }
        *unfinished = (!text.ends_with(b"\n")).then_some(source);
        self.write_all(text)
    }

    /// Called when the pipe `source` is closed: ends its unfinished line, if it has one and `ends_last_line` is set.
    pub(super) fn finish(&mut self, source: usize) -> io::Result<()> {
        let unfinished = Arc::clone(&self.unfinished);
        let mut unfinished = lock(&unfinished);
        if *unfinished == Some(source) && self.ends_last_line {
            *unfinished = None;
            self.write_all(b"\n")?;
        }
        Ok(())
    }

    fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.wait_for_room()?;
            match self.file.write(&bytes[..bytes.len().min(self.piece)]) {
                Ok(written) => bytes = &bytes[written..],
                Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Blocks until the file is ready for writing, or until the sink is abandoned. (Linux always reports a hang-up;
    /// macOS only if `HUP` is requested.)
    fn wait_for_room(&self) -> io::Result<()> {
        loop {
            let mut fds =
                [PollFd::new(&self.file, PollFlags::OUT), PollFd::new(&self.abandon, PollFlags::HUP)];
            match poll(&mut fds, None) {
                Err(rustix::io::Errno::INTR) => continue,
                other => other?,
            };
            if !fds[1].revents().is_empty() {
                return Err(ErrorKind::TimedOut.into());
            }
            if !fds[0].revents().is_empty() {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, pipe};

    #[test]
    fn a_line_that_another_source_has_begun_is_ended_first() {
        let (_keep, abandon) = {
            let (r, w) = pipe().unwrap();
            (w, r)
        };
        let (mut reader, writer) = pipe().unwrap();
        let mut sink = Sink::new(writer.as_fd(), &abandon).unwrap();
        drop(writer);
        for (source, text) in
            [(0, "begun"), (0, " on\n"), (1, "half"), (0, "whole\n"), (1, " line"), (2, "last")]
        {
            sink.write(source, text.as_bytes()).unwrap();
        }
        sink.finish(1).unwrap();
        sink.finish(2).unwrap();
        drop(sink);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "begun on\nhalf\nwhole\n line\nlast\n");
    }

    #[test]
    fn a_full_pipe_that_nobody_reads_is_given_up_when_abandoned() {
        let (abandon, keep) = pipe().unwrap();
        let (_reader, writer) = pipe().unwrap();
        let mut sink = Sink::new(writer.as_fd(), &abandon).unwrap();
        let thread = std::thread::spawn(move || sink.write(0, &[b'x'; 1 << 20]));
        drop(keep);
        assert_eq!(thread.join().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
