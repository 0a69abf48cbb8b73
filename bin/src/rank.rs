//! A rank at work: its group, its share of the files, and what it tells of itself.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::{Communicator, Operation, ReduceOp, TcpConfig, all_gather_object, gather_object, peak_rss_bytes};
use report::RankTimes;
use report::metrics::{CheckpointTimes, Held, MetricsWriter, Summary};
use report::trace::{self, TraceRecorder};
use sampler::{DistributedSampler, DistributedSamplerConfig};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::options::Backend;
use crate::outputs;
use crate::start::host_name;
use crate::{backends, devices};

/// Longer than anybody waits.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);

/// What each rank tells of itself.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RankSummary {
    /// Time of the training loop, in seconds.
    pub seconds: f64,
    /// Of these, spent in collectives.
    pub communication_s: f64,
    /// Steps of the training loop.
    pub steps: usize,
    /// The most memory that it held, in bytes, where known.
    pub peak_rss_bytes: Option<u64>,
    /// What it held of the model and sent, where that was measured.
    pub held: Option<Held>,
}

/// What rank 0 knows in the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Outcome<T> {
    /// What it has learnt.
    pub trained: T,
    /// By rank.
    pub ranks: Vec<RankSummary>,
    /// How the ranks talked.
    pub backend: String,
    /// Where the tensors of rank 0 were, as `--device` takes it.
    pub device: String,
}

impl<T> Outcome<T> {
    /// Each rank's mean step, for the report.
    pub fn rank_times(&self) -> Vec<RankTimes> {
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

/// Runs while a rank trains.
#[derive(Debug)]
pub struct Stopwatch {
    comms: Vec<Arc<dyn Communicator>>,
    began: Instant,
    busy_ns: u64,
    /// In groups that there were before.
    before_ns: u64,
}

impl Stopwatch {
    /// The ranks go on in another group; what is measured of the one before stays.
    pub(crate) fn regroup(&mut self, comm: &Arc<dyn Communicator>) {
        self.before_ns += busy_ns(&self.comms) - self.busy_ns;
        self.comms = vec![comm.clone()];
        self.busy_ns = busy_ns(&self.comms);
    }

    /// Time since the start, and how much of it was spent in collectives.
    pub fn measured(&self) -> Measured {
        let seconds = self.began.elapsed().as_secs_f64();
        let busy_ns = self.before_ns + busy_ns(&self.comms) - self.busy_ns;
        Measured { seconds, communication_s: busy_ns as f64 * 1e-9 }
    }
}

/// Time spent in collectives of these groups.
fn busy_ns(comms: &[Arc<dyn Communicator>]) -> u64 {
    comms.iter().map(|comm| comm.stats().busy_ns).sum()
}

/// What a [`Stopwatch`] showed.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub(crate) seconds: f64,
    communication_s: f64,
}

impl Measured {
    /// The same, where this rank was in collectives for so many nanoseconds.
    pub(crate) fn communicating(self, busy_ns: u64) -> Self {
        Self { communication_s: busy_ns as f64 * 1e-9, ..self }
    }

    /// The same, where this rank computed for so many seconds and waited for others the rest of the time.
    pub(crate) fn computing(self, seconds: f64) -> Self {
        Self { communication_s: (self.seconds - seconds).max(0.0), ..self }
    }
}

/// How far a rank has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Stage {
    /// It has come when the others were at work, and has not got their state yet.
    New,
    /// It has met the others.
    Joined,
    /// The first rank has done what it does alone.
    Told,
    /// It is about to take the first step, or has taken some.
    AtWork,
}

/// One process of a job.
#[derive(Debug)]
pub struct Rank {
    /// The group of all ranks.
    pub comm: Arc<dyn Communicator>,
    /// Where `--metrics` go; the rank that prints alone has it.
    pub metrics: Option<MetricsWriter>,
    /// What it holds of the model and sends, for the summary.
    pub held: Option<Held>,
    /// What checkpoints took, for the summary.
    pub checkpoints: Option<CheckpointTimes>,
    device: &'static str,
    summaries: Vec<RankSummary>,
    /// It came when the others were at work.
    pub(crate) newcomer: bool,
    /// Where others may come later: how long to wait for one.
    pub(crate) newcomers_within: Option<Duration>,
    pub(crate) stage: Stage,
}

impl Rank {
    /// Joins the group that the configuration names.
    ///
    /// # Errors
    /// Those of [`comm::Tcp::connect`], or of the back end that was asked for.
    pub fn join(backend: Backend, device: &Device, config: &TcpConfig) -> Result<Self> {
        let newcomer = config.elastic.as_ref().is_some_and(|elastic| elastic.newcomer);
        let may_come = config.elastic.as_ref().is_some_and(|elastic| elastic.file.is_some());
        Ok(Self {
            comm: backends::connect(backend, device, config)?,
            metrics: None,
            held: None,
            checkpoints: None,
            device: devices::name(device),
            summaries: Vec::new(),
            newcomer,
            newcomers_within: may_come.then_some(config.timeout.min(LONGEST_WAIT)),
            stage: if newcomer { Stage::New } else { Stage::Joined },
        })
    }

    #[cfg(test)]
    pub(crate) fn over(comm: Arc<dyn Communicator>) -> Self {
        let device = devices::name(&Device::Cpu);
        let (newcomer, newcomers_within, stage) = (false, None, Stage::Joined);
        Self {
            comm,
            metrics: None,
            held: None,
            checkpoints: None,
            device,
            summaries: Vec::new(),
            newcomer,
            newcomers_within,
            stage,
        }
    }

    /// Runs `work` on rank 0 while the others wait, for however long it takes: rank 0 tells them now and then that it is
    /// still at it, well within the time-out. `None` on the others.
    ///
    /// # Errors
    /// What `work` fails with; a rank that failed meanwhile.
    pub fn first_alone<T>(&self, timeout: Duration, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
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
        // All are here before anything is printed: who is lost from now on was no rank that the others still waited for.
        tell(1)?;
        let done = std::thread::scope(|scope| {
            let (end, ended) = mpsc::channel::<()>();
            let news = scope.spawn(move || -> Result<()> {
                while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                    tell(1)?;
                }
                Ok(())
            });
            let done = work()?;
            drop(end);
            // It fails with what it fails with; a panic is none of its habits.
            news.join().unwrap_or(Ok(())).map(|()| done)
        })?;
        tell(0)?;
        Ok(Some(done))
    }

    /// This rank's part of a data set, in the order that PyTorch's sampler of the same name gives.
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

    /// True for the rank that prints and saves.
    pub fn is_first(&self) -> bool {
        self.comm.rank() == 0
    }

    /// Begins to measure.
    pub fn stopwatch(&self) -> Stopwatch {
        self.stopwatch_over(&[])
    }

    /// Begins to measure, where collectives run in groups of some of the ranks, too.
    pub fn stopwatch_over(&self, groups: &[Arc<dyn Communicator>]) -> Stopwatch {
        let comms: Vec<_> = std::iter::once(&self.comm).chain(groups).cloned().collect();
        Stopwatch { busy_ns: busy_ns(&comms), comms, began: Instant::now(), before_ns: 0 }
    }

    /// Tells the others what was measured, on every rank. The seconds of this rank's training loop.
    ///
    /// # Errors
    /// A rank that failed.
    pub fn gather_measured(&mut self, measured: Measured, steps: usize) -> Result<f64> {
        let Measured { seconds, communication_s } = measured;
        let (peak_rss_bytes, held) = (peak_rss_bytes(), self.held.take());
        let own = RankSummary { seconds, communication_s, steps, peak_rss_bytes, held };
        self.summaries = all_gather_object(&*self.comm, &own)?;
        Ok(seconds)
    }

    /// Writes what was gathered, on the rank that has the metrics.
    pub(crate) fn write_summary(
        &self,
        run: Option<&str>,
        metrics: Option<&mut MetricsWriter>,
        seconds: f64,
    ) -> Result<()> {
        let Some(metrics) = metrics else { return Ok(()) };
        let peaks: Vec<u64> = self.summaries.iter().filter_map(|rank| rank.peak_rss_bytes).collect();
        let world_size = self.comm.world_size();
        let held: Option<Vec<Held>> = self.summaries.iter().map(|rank| rank.held).collect();
        let held = held.unwrap_or_default();
        let (peak_rss_bytes, held, checkpoints) = (&peaks[..], &held[..], self.checkpoints);
        Ok(metrics.summary(&Summary { run, seconds, world_size, peak_rss_bytes, held, checkpoints })?)
    }

    /// Brings the traces of all ranks together in one file, where they were recorded.
    pub(crate) fn write_trace(&self, recorder: Option<TraceRecorder>, path: Option<&Path>) -> Result<()> {
        let (Some(recorder), Some(path)) = (recorder, path) else { return Ok(()) };
        let own = recorder.finish(self.comm.rank(), &host_name());
        let Some(traces) = gather_object(&*self.comm, &own, 0)? else { return Ok(()) };
        Ok(outputs::write(path, trace::merge(&traces)?)?)
    }

    pub(crate) fn outcome<T>(self, trained: T) -> Outcome<T> {
        let backend = self.comm.backend().to_string();
        Outcome { trained, ranks: self.summaries, backend, device: self.device.to_string() }
    }
}
