//! Threads that forward the output of the ranks.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, PipeWriter, Read, pipe};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use comm::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::environment::Job;
use super::event::Event;
use super::lines::{Item, LineBuffer};
use super::logs::{LogFile, Stream};
use super::sink::Sink;
use super::start::Workers;
use crate::{Notes, SpawnConfig};

/// Lines of standard error that are kept for the failure report, for each rank.
const TAIL_LINES: usize = 20;
/// Maximum number of bytes of each of these lines.
const TAIL_LINE: usize = 1000;
/// Bytes that are read at once.
const CHUNK: usize = 64 << 10;
/// How much may be left in a pipe when its rank has ended: Linux's limit for the size of a pipe. More can only come
/// from a process that outlives the rank.
const MAX_REMAINING: usize = 1 << 20;

/// What the forwarding threads have extracted from the streams, by local rank.
#[derive(Debug, Default)]
pub(super) struct Captured {
    pub(super) results: Vec<Option<String>>,
    pub(super) tails: Vec<VecDeque<String>>,
    /// Why a log is incomplete.
    pub(super) lost_log: Option<Error>,
}

/// Two forwarding threads, one for all standard outputs and one for all standard errors, so that neither waits for the
/// other. Dropping this ends them.
#[derive(Debug)]
pub(super) struct Output {
    threads: Vec<JoinHandle<Captured>>,
    finish: Option<PipeWriter>,
    abandon: Option<PipeWriter>,
    /// Log files of the standard errors, by local rank.
    logs: Vec<Option<PathBuf>>,
}

impl Output {
    /// Number of [`Event::Drained`] events to expect.
    pub(super) const THREADS: usize = 2;

    pub(super) fn start(
        workers: &mut Workers,
        config: &SpawnConfig,
        job: &Job,
        events: &Sender<Event>,
    ) -> Result<Self> {
        let (outs, errs) = workers.take_pipes();
        let sources = |stream, pipes: Vec<OwnedFd>| {
            let source = |(local_rank, pipe)| {
                let log =
                    config.log(&job.round().run_id, job.round().restart, job.rank(local_rank), stream)?;
                Ok(StreamReader::new(local_rank, pipe, stream == Stream::Out, log))
            };
            pipes.into_iter().enumerate().map(source).collect::<Result<Vec<_>>>()
        };
        let sources =
            [(Stream::Out, sources(Stream::Out, outs)?), (Stream::Err, sources(Stream::Err, errs)?)];
        Self::start_threads(sources, config, events)
            .map_err(|e| Error::system("cannot forward the workers' output", e))
    }

    fn start_threads(
        sources: [(Stream, Vec<StreamReader>); 2],
        config: &SpawnConfig,
        events: &Sender<Event>,
    ) -> io::Result<Self> {
        let (finish, finish_writer) = pipe()?;
        let (abandon, abandon_writer) = pipe()?;
        // This program's own messages start on a new line; the output of another program is passed on unchanged.
        let (out, err) = Sink::standard(&abandon, config.program.is_none())?;
        let log_path = |source: &StreamReader| source.log.as_ref().map(|log| log.path().to_path_buf());
        let logs = sources[1].1.iter().map(log_path).collect();
        let unread = Arc::new(AtomicBool::new(false));
        let mut output =
            Self { threads: Vec::new(), finish: Some(finish_writer), abandon: Some(abandon_writer), logs };
        for ((stream, sources), sink) in sources.into_iter().zip([out, err]) {
            let shown = config.logs.as_ref().is_none_or(|logs| logs.shows(stream));
            let forwarder = Forwarder {
                sources,
                sink: Some(sink),
                shown,
                shown_ranks: config.shown_ranks.clone(),
                finish: finish.try_clone()?,
                abandon: abandon.try_clone()?,
                events: events.clone(),
                unread: unread.clone(),
                notes: config.notes.clone(),
                reports: stream == Stream::Out,
                captured: Captured::default(),
            };
            output
                .threads
                .push(std::thread::Builder::new().name("forward".into()).spawn(|| forwarder.run())?);
        }
        Ok(output)
    }

    /// Returns the log file of a rank's standard error.
    pub(super) fn log(&self, local_rank: usize) -> Option<PathBuf> {
        self.logs.get(local_rank).cloned().flatten()
    }

    /// Called when all ranks have ended: forwards what is still in the pipes, then sends [`Event::Drained`].
    pub(super) fn finish(&mut self) {
        self.finish = None;
    }

    /// Ends both threads, even while they read or write, and returns what they have captured.
    pub(super) fn join(&mut self) -> Captured {
        self.finish = None;
        self.abandon = None;
        let mut all = Captured::default();
        for thread in self.threads.drain(..) {
            let part = thread.join().unwrap_or_default();
            all.results.extend(part.results);
            all.tails.extend(part.tails);
            all.lost_log = all.lost_log.or(part.lost_log);
        }
        all
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.join();
    }
}

/// The reading end of one rank's stream.
#[derive(Debug)]
struct StreamReader {
    id: usize,
    /// Local rank.
    rank: usize,
    pipe: File,
    lines: LineBuffer,
    log: Option<LogFile>,
    open: bool,
    /// Bytes that may still be read once the ranks have ended.
    left: usize,
}

impl StreamReader {
    fn new(rank: usize, pipe: OwnedFd, reports: bool, log: Option<LogFile>) -> Self {
        let id = 2 * rank + usize::from(reports);
        Self {
            id,
            rank,
            pipe: pipe.into(),
            lines: LineBuffer::new(reports),
            log,
            open: true,
            left: MAX_REMAINING,
        }
    }
}

/// State of one forwarding thread.
struct Forwarder {
    sources: Vec<StreamReader>,
    /// `None` once writing has failed; the pipes are still read, so that no rank blocks.
    sink: Option<Sink>,
    /// Whether output that is logged is forwarded as well.
    shown: bool,
    /// Local ranks whose output is forwarded; `None` for all.
    shown_ranks: Option<Vec<usize>>,
    finish: PipeReader,
    abandon: PipeReader,
    events: Sender<Event>,
    /// Set when standard output has no reader any more, which ends the job. The ranks' messages about each other's end
    /// are then not shown.
    unread: Arc<AtomicBool>,
    notes: Option<Arc<dyn Notes>>,
    reports: bool,
    captured: Captured,
}

impl Forwarder {
    fn run(mut self) -> Captured {
        match self.reports {
            true => self.captured.results.resize(self.sources.len(), None),
            false => self.captured.tails.resize(self.sources.len(), VecDeque::new()),
        }
        let mut sources = std::mem::take(&mut self.sources);
        let mut chunk = vec![0; CHUNK];
        let mut finishing = false;
        while let Some(ready) = self.ready(&sources, &mut finishing) {
            for at in ready {
                self.read(&mut sources[at], &mut chunk, finishing);
            }
        }
        for source in sources.iter_mut().filter(|source| source.open) {
            self.close(source);
        }
        // The receiver is gone if the launcher has given up.
        let _ = self.events.send(Event::Drained);
        self.captured
    }

    /// Waits for readable sources and returns their indices; `None` when the work is done. (Linux always reports a
    /// hang-up; macOS only if `HUP` is requested.)
    fn ready(&self, sources: &[StreamReader], finishing: &mut bool) -> Option<Vec<usize>> {
        let open: Vec<usize> = (0..sources.len()).filter(|&at| sources[at].open).collect();
        if open.is_empty() {
            return None;
        }
        let mut fds = vec![PollFd::new(&self.abandon, PollFlags::HUP)];
        fds.extend(open.iter().map(|&at| PollFd::new(&sources[at].pipe, PollFlags::IN)));
        if !*finishing {
            fds.push(PollFd::new(&self.finish, PollFlags::HUP));
        }
        let at_once = finishing.then_some(Timespec { tv_sec: 0, tv_nsec: 0 });
        let count = match poll(&mut fds, at_once.as_ref()) {
            Err(rustix::io::Errno::INTR) => return Some(Vec::new()),
            other => other.ok()?,
        };
        if count == 0 || !fds[0].revents().is_empty() {
            return None;
        }
        let ready = open
            .iter()
            .zip(&fds[1..])
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|(&at, _)| at)
            .collect();
        *finishing |= fds.get(open.len() + 1).is_some_and(|fd| !fd.revents().is_empty());
        Some(ready)
    }

    fn read(&mut self, source: &mut StreamReader, chunk: &mut [u8], finishing: bool) {
        match source.pipe.read(chunk) {
            Ok(0) => self.close(source),
            Ok(count) => {
                let StreamReader { id, rank, lines, log, .. } = source;
                lines.push(&chunk[..count], |item| self.take(*id, *rank, log.as_mut(), item));
                if finishing {
                    source.left = source.left.saturating_sub(count);
                    if source.left == 0 {
                        self.close(source);
                    }
                }
            }
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
            Err(_) => self.close(source),
        }
    }

    fn close(&mut self, source: &mut StreamReader) {
        source.open = false;
        let StreamReader { id, rank, lines, log, .. } = source;
        lines.finish(|item| self.take(*id, *rank, log.as_mut(), item));
        let lost = log.as_mut().and_then(LogFile::lost);
        self.captured.lost_log = self.captured.lost_log.take().or(lost);
        self.put(|sink| sink.finish(source.id));
    }

    fn take(&mut self, id: usize, rank: usize, log: Option<&mut LogFile>, item: Item<'_>) {
        match item {
            Item::Report(report) => {
                self.captured.results[rank] = Some(String::from_utf8_lossy(report).into_owned());
            }
            Item::Note(text) => {
                if let Some(notes) = &self.notes {
                    notes.note(rank, &String::from_utf8_lossy(text));
                }
            }
            // The receiver is gone if the launcher has given up.
            Item::Met(text) => {
                let numbers = String::from_utf8_lossy(text);
                let without = numbers.split(' ').filter_map(|number| number.parse().ok()).collect();
                drop(self.events.send(Event::Met { local_rank: rank, without }));
            }
            Item::Text(text) => {
                if let Some(tail) = self.captured.tails.get_mut(rank) {
                    keep(tail, text);
                }
                let is_kept = log.is_some_and(|log| log.write(text));
                let is_shown = self.shown_ranks.as_ref().is_none_or(|ranks| ranks.contains(&rank));
                if is_shown && (self.shown || !is_kept) && !self.unread.load(SeqCst) {
                    self.put(|sink| sink.write(id, text));
                }
            }
        }
    }

    fn put(&mut self, write: impl FnOnce(&mut Sink) -> io::Result<()>) {
        let Some(sink) = &mut self.sink else { return };
        let mut written = None;
        match &self.notes {
            Some(notes) => {
                let mut write = Some(write);
                notes.aside(&mut || {
                    if let Some(write) = write.take() {
                        written = Some(write(sink));
                    }
                });
            }
            None => written = Some(write(sink)),
        }
        let Some(Err(error)) = written else { return };
        self.sink = None;
        // Failing to write standard error does not end the job; failing to write standard output does.
        if self.reports {
            self.unread.store(error.kind() == ErrorKind::BrokenPipe, SeqCst);
            let _ = self.events.send(Event::OutputFailed(error));
        }
    }
}

/// Appends a line to the last lines kept for a rank.
fn keep(tail: &mut VecDeque<String>, text: &[u8]) {
    let line = String::from_utf8_lossy(&text[..text.len().min(TAIL_LINE)]);
    if line.trim().is_empty() {
        return;
    }
    if tail.len() == TAIL_LINES {
        tail.pop_front();
    }
    tail.push_back(line.trim_end().to_owned());
}
