//! Tracing spans show that a bucket's all-reduce is in progress before backward ends. A separate test binary: its subscriber
//! is global, since it must see the communicators' threads.
#![allow(clippy::expect_used)]

mod common;

use std::collections::HashSet;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, ThreadId};
use std::time::Duration;

use comm::Operation;
use common::layers::{Layers, apart};
use common::on_all_ranks;
use ddp::DdpConfig;
use tracing::span;

const RANKS: usize = 2;

/// A span event.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Happened {
    what: What,
    span: &'static str,
    /// The collective, if the span is one.
    call: Call,
    on: ThreadId,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    Enter,
    Exit,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    AllReduce,
    Other,
}

impl tracing::field::Visit for Call {
    fn record_str(&mut self, _: &tracing::field::Field, value: &str) {
        if value == "all_reduce" {
            *self = Call::AllReduce;
        }
    }

    fn record_debug(&mut self, _: &tracing::field::Field, _: &dyn std::fmt::Debug) {}
}

#[derive(Default)]
struct Spans {
    known: Mutex<Vec<(&'static str, Call)>>,
    log: Mutex<Vec<Happened>>,
    changed: Condvar,
}

impl Spans {
    fn note(&self, what: What, id: &span::Id) {
        let (span, call) = self.known.lock().expect("no panic")[id.into_u64() as usize - 1];
        let on = thread::current().id();
        self.log.lock().expect("no panic").push(Happened { what, span, call, on });
        self.changed.notify_all();
    }

    /// Waits until the log from `start` on satisfies `done`; returns false on timeout.
    fn wait_for(&self, start: usize, done: impl Fn(&[Happened]) -> bool) -> bool {
        let log = self.log.lock().expect("no panic");
        let bound = Duration::from_secs(60);
        let waited = self.changed.wait_timeout_while(log, bound, |log| !done(&log[start..]));
        !waited.expect("no panic").1.timed_out()
    }
}

/// The tracing subscriber that records to `Spans`.
struct Subscriber(Arc<Spans>);

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, attributes: &span::Attributes<'_>) -> span::Id {
        let mut call = Call::Other;
        attributes.record(&mut call);
        let mut known = self.0.known.lock().expect("no panic");
        known.push((attributes.metadata().name(), call));
        span::Id::from_u64(known.len() as u64)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {}

    fn enter(&self, id: &span::Id) {
        self.0.note(What::Enter, id);
    }

    fn exit(&self, id: &span::Id) {
        self.0.note(What::Exit, id);
    }
}

/// Returns the number of non-training threads on which an all-reduce has started.
fn communicating(log: &[Happened], training: &HashSet<ThreadId>) -> usize {
    let begun =
        log.iter().filter(|happened| (happened.what, happened.call) == (What::Enter, Call::AllReduce));
    begun
        .map(|happened| happened.on)
        .filter(|thread| !training.contains(thread))
        .collect::<HashSet<_>>()
        .len()
}

/// Every rank's backward waits at the first layer until all ranks' communicators have started an all-reduce.
#[test]
fn a_buckets_all_reduce_is_under_way_before_backward_ends() {
    let spans = Arc::new(Spans::default());
    tracing::subscriber::set_global_default(Subscriber(spans.clone())).expect("the only subscriber");
    for config in [apart(), DdpConfig { first_bucket_bytes: 200, bucket_bytes: 300, ..Default::default() }] {
        let training = Arc::new(Mutex::new(HashSet::new()));
        on_all_ranks(RANKS, |comm| {
            let (rank, main) = (comm.rank(), thread::current().id());
            training.lock().expect("no panic").insert(main);
            let ddp = Layers::ddp(comm.clone(), &config)?;
            for step in 0..3 {
                let start = spans.log.lock().expect("no panic").len();
                // No rank starts this step's communication before every rank has recorded where the step starts.
                comm.run(Operation::Barrier)?;
                let (spans_of_probe, training) = (spans.clone(), training.clone());
                let probe = move || {
                    let training = training.lock().expect("no panic").clone();
                    match spans_of_probe.wait_for(start, |log| communicating(log, &training) == RANKS) {
                        true => Ok(()),
                        false => candle_core::bail!("no all-reduce has begun in all this time"),
                    }
                };
                ddp.backward(&ddp.model()?.loss(step * 10 + rank as u64, true, probe)?)?;
                assert_overlap(main, &spans.log.lock().expect("no panic")[start..]);
            }
            Ok(())
        });
    }
}

/// Checks the log of one step: during its backward this rank started a bucket, and then an all-reduce started on another
/// thread.
fn assert_overlap(main: ThreadId, log: &[Happened]) {
    let at = |what, span| {
        let mine =
            |happened: &Happened| happened.on == main && happened.what == what && happened.span == span;
        log.iter().position(mine).unwrap_or_else(|| panic!("no {what:?} of {span} in {log:#?}"))
    };
    let (begin, end) = (at(What::Enter, "backward"), at(What::Exit, "backward"));
    let launched = at(What::Enter, "bucket");
    assert!(begin < launched && launched < end, "{log:#?}");
    assert!(communicating(&log[launched..end], &HashSet::from([main])) > 0, "{log:#?}");
}
