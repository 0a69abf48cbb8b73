//! Traces of all ranks as a Chrome trace, which Perfetto opens: `--trace FILE.json`.
//!
//! [`install`] sets up logging for a process; with `record` it also keeps all spans in memory. At the end each rank's
//! [`TraceRecorder::finish`] returns its [`RankTrace`], and [`merge`] makes one file of all of them.

mod merge;

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tracing::{Event, Level, Subscriber};
use tracing_chrome::{ChromeLayerBuilder, FlushGuard, TraceStyle};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::prelude::*;
use tracing_subscriber::registry::LookupSpan;

pub use merge::merge;

use crate::{Error, Result};

/// Sets up logging for this process: warnings and errors go to stderr, one line each. With `record`, spans and events
/// of every level are recorded too; without it, a span only costs reading a global variable.
///
/// # Errors
/// [`Error::AlreadyInstalled`] if logging was set up before.
///
/// ```
/// let recorder = report::trace::install(true)?;
/// tracing::info_span!("step", batch = 1).in_scope(|| { /* work */ });
/// let part = recorder.map(|recorder| recorder.finish(0, "localhost"));
/// let json = report::trace::merge(&Vec::from_iter(part))?;
/// assert!(json.contains(r#""name":"step""#));
/// # Ok::<(), report::Error>(())
/// ```
pub fn install(record: bool) -> Result<Option<TraceRecorder>> {
    let warnings = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .event_format(Line)
        .with_filter(LevelFilter::WARN);
    let subscriber = tracing_subscriber::registry().with(warnings);
    if !record {
        return subscriber.try_init().map(|()| None).map_err(|_| Error::AlreadyInstalled);
    }
    let bytes = SharedBytes::default();
    let (layer, guard) = ChromeLayerBuilder::new()
        .writer(bytes.clone())
        .include_args(true)
        .include_locations(false)
        .trace_style(TraceStyle::Threaded)
        .build();
    // The layer's clock starts when it is built.
    let started_unix_us =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
    subscriber.with(layer).try_init().map_err(|_| Error::AlreadyInstalled)?;
    Ok(Some(TraceRecorder { bytes, guard, started_unix_us }))
}

/// Formats an event like the other messages of this program: `warning: ...` or `error: ...`.
struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let begin = if *event.metadata().level() == Level::ERROR { "error: " } else { "warning: " };
        writer.write_str(begin)?;
        context.format_fields(writer.by_ref(), event)?;
        writer.write_char('\n')
    }
}

/// Records the spans of this process, with a separate track for each thread. Created by [`install`].
pub struct TraceRecorder {
    bytes: SharedBytes,
    guard: FlushGuard,
    started_unix_us: u64,
}

impl std::fmt::Debug for TraceRecorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceRecorder")
            .field("started_unix_us", &self.started_unix_us)
            .finish_non_exhaustive()
    }
}

impl TraceRecorder {
    /// Ends the recording, and returns what was recorded. Spans that are still open have no end in it.
    pub fn finish(self, rank: usize, host: &str) -> RankTrace {
        // Waits for the thread that writes.
        drop(self.guard);
        let bytes = std::mem::take(&mut *self.bytes.0.lock().unwrap_or_else(PoisonError::into_inner));
        let json = String::from_utf8(bytes).unwrap_or_default();
        RankTrace { rank, host: host.to_string(), started_unix_us: self.started_unix_us, json }
    }
}

/// The trace that one rank recorded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RankTrace {
    /// The rank.
    pub rank: usize,
    /// Host name.
    pub host: String,
    /// Start of its clock: microseconds since 1970, by its host's clock.
    pub started_unix_us: u64,
    /// A Chrome trace: a JSON array of events.
    pub json: String,
}

/// Buffer that the trace's thread writes and the recorder reads.
#[derive(Clone, Default)]
struct SharedBytes(Arc<Mutex<Vec<u8>>>);

impl Write for SharedBytes {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
