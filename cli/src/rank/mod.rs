//! The state of one rank of a job: its communicator, metrics, time measurements and summary.

mod conclusion;
mod loss;

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::internal::peak_rss_bytes;
use comm::{Communicator, Operation, ReduceOp, TcpConfig, all_gather_object};
use report::RankTimes;
use report::metrics::{CheckpointTimes, MemoryUse, MetricsWriter, PackedDocuments, Summary};
use sampler::{DistributedSampler, DistributedSamplerConfig};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::options::Backend;
use crate::{backends, devices};

pub(crate) use conclusion::leave;

/// A limit longer than any real timeout, so that it can be added to an `Instant`.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// Measurements of one rank, gathered on all ranks at the end.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankSummary {
    /// Time of the training loop, in seconds.
    pub seconds: f64,
    /// Part of `seconds` spent in collectives.
    pub communication_s: f64,
    /// Steps of the training loop.
    pub steps: usize,
    /// Peak resident memory, in bytes, where known.
    pub peak_rss_bytes: Option<u64>,
    /// Bytes of model state held and bytes sent, where measured.
    pub held: Option<MemoryUse>,
}

/// Result of a run, as rank 0 has it at the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome<T> {
    /// Rank 0's result of training.
    pub trained: T,
    /// Indexed by rank.
    pub ranks: Vec<RankSummary>,
    /// Name of the communication backend.
    pub backend: String,
    /// Device of rank 0's tensors, as `--device` spells it.
    pub device: String,
}

impl<T> Outcome<T> {
    /// Returns each rank's mean time per step, for the report.
    pub(crate) fn rank_times(&self) -> Vec<RankTimes> {
        let times = |(rank, summary): (usize, &RankSummary)| {
            let steps = summary.steps.max(1) as f64;
            RankTimes {
                rank,
                compute_s: (summary.seconds - summary.communication_s).max(0.0) / steps,
                communication_s: summary.communication_s / steps,
                peak_rss_bytes: summary.peak_rss_bytes,
            }
        };
        self.ranks.iter().enumerate().map(times).collect()
    }
}

/// Measures a rank's training loop: elapsed time, and time spent in collectives.
#[derive(Debug)]
pub struct Stopwatch {
    comms: Vec<Arc<dyn Communicator>>,
    began: Instant,
    busy_ns: u64,
    /// Time in collectives of earlier groups, in nanoseconds.
    before_ns: u64,
}

impl Stopwatch {
    /// Switches to a new group; the time measured in the old one is kept.
    pub(crate) fn regroup(&mut self, comm: &Arc<dyn Communicator>) {
        self.before_ns += busy_ns(&self.comms) - self.busy_ns;
        self.comms = vec![comm.clone()];
        self.busy_ns = busy_ns(&self.comms);
    }

    /// Returns the time since the start, and how much of it was spent in collectives.
    pub fn measured(&self) -> Measured {
        let seconds = self.began.elapsed().as_secs_f64();
        let busy_ns = self.before_ns + busy_ns(&self.comms) - self.busy_ns;
        Measured { seconds, communication_s: busy_ns as f64 * 1e-9 }
    }
}

/// Returns the nanoseconds spent in collectives of these groups.
fn busy_ns(comms: &[Arc<dyn Communicator>]) -> u64 {
    comms.iter().map(|comm| comm.stats().busy_ns).sum()
}

/// Times measured by a [`Stopwatch`].
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Elapsed time, in seconds.
    pub seconds: f64,
    communication_s: f64,
}

impl Measured {
    /// Returns the same with the time in collectives set to `busy_ns` nanoseconds.
    pub fn communicating(self, busy_ns: u64) -> Self {
        Self { communication_s: busy_ns as f64 * 1e-9, ..self }
    }

    /// Returns the same with `seconds` of computation, and the rest of the time counted as communication.
    pub fn computing(self, seconds: f64) -> Self {
        Self { communication_s: (self.seconds - seconds).max(0.0), ..self }
    }
}

/// How far a rank has got, from joining to the end.
///
/// A collective that loses a rank may succeed on some of the others and fail on the rest. So after each loss the ranks
/// that are left exchange their phases. Training itself continues from the rank that has completed the most steps. Each
/// phase after it begins with the success of a collective that no rank enters before its part of the phase before is
/// done: if one rank has got that far, that phase is complete, and all go on from the furthest phase of any of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RankPhase {
    /// A newcomer that joined a running job and has not received the training state yet.
    New,
    /// The rank has joined the group.
    Joined,
    /// The first rank has completed the part that it runs alone.
    Prepared,
    /// The rank is about to take its first step, or has taken some.
    AtWork,
    /// All ranks have completed training and the work after it, such as saving and validation. The result is still to be
    /// printed and written.
    Trained,
    /// The first rank has printed and written the result. Nothing is left to do.
    Concluded,
}

impl RankPhase {
    /// Whether it is no newcomer, and has not begun training: then no step can have been completed.
    pub(crate) fn is_before_training(self) -> bool {
        (Self::Joined..Self::AtWork).contains(&self)
    }
}

/// Says that these ranks have joined a running job.
pub(crate) fn have_come(new: &[usize]) -> String {
    let names: Vec<String> = new.iter().map(|number| format!("rank {number}")).collect();
    format!("{} {} come", names.join(" and "), if new.len() == 1 { "has" } else { "have" })
}

/// One process of a job.
#[derive(Debug)]
pub struct Rank {
    /// The communicator of all ranks.
    pub comm: Arc<dyn Communicator>,
    /// The writer of `--metrics`; `Some` on the reporting rank only, or on all ranks of an elastic run.
    pub metrics: Option<MetricsWriter>,
    /// Bytes of model state held and bytes sent, for the summary.
    pub held: Option<MemoryUse>,
    /// Times taken by checkpoints, for the summary.
    pub checkpoints: Option<CheckpointTimes>,
    /// What became of documents, for the summary.
    pub packing: Option<PackedDocuments>,
    device: &'static str,
    summaries: Vec<RankSummary>,
    /// Name and seconds of the run whose summary this rank has not written, as another one was to do it.
    unwritten: Option<(Option<&'static str>, f64)>,
    /// Whether it joined a running job.
    pub newcomer: bool,
    /// How long to wait for a newcomer; `None` if none can join.
    pub newcomers_within: Option<Duration>,
    /// The number of ranks with which the job began.
    pub begun_with: usize,
    /// How far this rank has got.
    pub phase: RankPhase,
}

impl Rank {
    /// Joins the group described by the configuration.
    ///
    /// # Errors
    /// Those of [`comm::Tcp::connect`], or of the selected backend.
    pub fn join(backend: Backend, device: &Device, config: &TcpConfig) -> Result<Self> {
        let newcomer = config.elastic.as_ref().is_some_and(|elastic| elastic.newcomer);
        let may_come = config.elastic.as_ref().is_some_and(|elastic| elastic.file.is_some());
        Ok(Self {
            newcomer,
            newcomers_within: may_come.then_some(config.timeout.min(LONGEST_WAIT)),
            begun_with: config.world_size,
            phase: if newcomer { RankPhase::New } else { RankPhase::Joined },
            ..Self::from_comm(backends::connect(backend, device, config)?, device)
        })
    }

    /// Creates a rank of an existing group, such as one of threads. No rank can join it.
    pub fn from_comm(comm: Arc<dyn Communicator>, device: &Device) -> Self {
        Self {
            begun_with: comm.world_size(),
            comm,
            metrics: None,
            held: None,
            checkpoints: None,
            packing: None,
            device: devices::name(device),
            summaries: Vec::new(),
            unwritten: None,
            newcomer: false,
            newcomers_within: None,
            phase: RankPhase::Joined,
        }
    }

    /// Runs `work` on rank 0 while the other ranks wait, for any length of time: rank 0 signals regularly, well
    /// within the timeout, that it is still working. Returns `None` on the others.
    ///
    /// # Errors
    /// The error of `work`; no thread; a rank that failed meanwhile.
    pub(crate) fn first_alone<T>(
        &self,
        timeout: Duration,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        self.first_alone_beside(Builder::new(), timeout, work)
    }

    /// As [`first_alone`](Self::first_alone), with this thread for its signals.
    fn first_alone_beside<T>(
        &self,
        thread: Builder,
        timeout: Duration,
        work: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        let period = (timeout / 4).min(Duration::from_secs(2));
        let tell = |busy: u8| -> Result<bool> {
            let state = Tensor::new(&[busy], &Device::Cpu)?;
            self.comm.run(Operation::AllReduce { tensor: state.clone(), op: ReduceOp::Max })?;
            Ok(state.to_vec1::<u8>()?[0] > 0)
        };
        if !self.is_first() {
            while tell(0)? {}
            return Ok(None);
        }
        // A first exchange before anything is printed: all ranks are here, so a rank lost from here on cannot be taken
        // for one that has not come yet.
        tell(1)?;
        let done = std::thread::scope(|scope| {
            let (end, ended) = mpsc::channel::<()>();
            let report = move || -> Result<()> {
                while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                    tell(1)?;
                }
                Ok(())
            };
            let refused = |error| comm::Error::system("starting a thread", error);
            let reports = thread.name("still at work".into()).spawn_scoped(scope, report).map_err(refused)?;
            let done = work()?;
            drop(end);
            // The thread returns communication errors and does not panic.
            reports.join().unwrap_or(Ok(())).map(|()| done)
        })?;
        tell(0)?;
        Ok(Some(done))
    }

    /// Returns the sampler for this rank's share of a data set, in the order of PyTorch's sampler of the same name.
    ///
    /// # Errors
    /// A data set too long to count.
    pub fn sampler(&self, dataset_len: usize, shuffle: bool) -> Result<DistributedSampler> {
        Ok(DistributedSampler::new(DistributedSamplerConfig {
            dataset_len,
            num_replicas: self.comm.world_size(),
            rank: self.comm.rank(),
            shuffle,
            ..DistributedSamplerConfig::default()
        })?)
    }

    /// True for rank 0, which prints and saves.
    pub fn is_first(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Starts a stopwatch over the group of all ranks.
    pub fn stopwatch(&self) -> Stopwatch {
        self.stopwatch_over(&[])
    }

    /// Starts a stopwatch that also counts collectives in these other groups.
    pub fn stopwatch_over(&self, groups: &[Arc<dyn Communicator>]) -> Stopwatch {
        let comms: Vec<_> = std::iter::once(&self.comm).chain(groups).cloned().collect();
        Stopwatch { busy_ns: busy_ns(&comms), comms, began: Instant::now(), before_ns: 0 }
    }

    /// Exchanges the measurements, on every rank. Returns the seconds of this rank's training loop.
    ///
    /// # Errors
    /// A rank that failed.
    pub(crate) fn gather_measured(&mut self, measured: Measured, steps: usize) -> Result<f64> {
        let Measured { seconds, communication_s } = measured;
        let (peak_rss_bytes, held) = (peak_rss_bytes(), self.held.take());
        let own = RankSummary { seconds, communication_s, steps, peak_rss_bytes, held };
        self.summaries = all_gather_object(&*self.comm, &own)?;
        Ok(seconds)
    }

    /// Writes the gathered summary, on the rank that is given the metrics. In an elastic run, a rank that replaces it
    /// later writes the summary if it is missing.
    ///
    /// # Errors
    /// Metrics that cannot be written.
    pub(crate) fn write_summary(
        &mut self,
        run: Option<&'static str>,
        metrics: Option<&mut MetricsWriter>,
        seconds: f64,
    ) -> Result<()> {
        let Some(metrics) = metrics else {
            self.unwritten = Some((run, seconds));
            return Ok(());
        };
        let peaks: Vec<u64> = self.summaries.iter().filter_map(|rank| rank.peak_rss_bytes).collect();
        let world_size = self.summaries.len();
        let held: Option<Vec<MemoryUse>> = self.summaries.iter().map(|rank| rank.held).collect();
        let held = held.unwrap_or_default();
        let (peak_rss_bytes, held) = (&peaks[..], &held[..]);
        let &mut Self { checkpoints, packing, .. } = self;
        let summary = Summary { run, seconds, world_size, peak_rss_bytes, held, checkpoints, packing };
        Ok(metrics.summary(&summary)?)
    }

    /// Returns the result of the run, which counts on rank 0.
    pub fn outcome<T>(&self, trained: T) -> Outcome<T> {
        let (ranks, backend) = (self.summaries.clone(), self.comm.backend().to_string());
        Outcome { trained, ranks, backend, device: self.device.to_string() }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::thread::Builder;
    use std::time::Duration;

    use candle_core::Device;
    use comm::Local;

    use super::Rank;

    #[test]
    fn the_first_rank_says_that_it_gets_no_thread() {
        let said = Local::run_shared(2, |comm| {
            let rank = Rank::from_comm(comm, &Device::Cpu);
            // More memory for its stack than there are addresses.
            let thread = Builder::new().stack_size(1 << 60);
            let done = rank.first_alone_beside(thread, Duration::from_secs(60), || Ok(5));
            Ok(done.map_err(|error| error.to_string()))
        });
        let said = said.unwrap();
        assert!(said[0].clone().unwrap_err().starts_with("starting a thread: "), "{said:?}");
        assert!(said[1].is_err(), "{said:?}");
    }
}
