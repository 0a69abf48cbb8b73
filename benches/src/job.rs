//! Jobs that ranks run for the benchmarks: this program starts itself as the ranks.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::{DType, Device};
use cli::error::{Error, Result};
use cli::start::{hand_over, handed_over};
use comm::{Communicator, Operation, Tcp, TcpConfig, Transport};
use launch::SpawnConfig;
use plan::measure::{Measured, Row, measure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::workload::{self, Figures, Training};

const JOB: &str = "GIRANDOLE_BENCH_JOB";
/// Maximum number of warm-up calls.
const WARM_UP: u64 = 5;

/// What the ranks do. Rank 0 hands over the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Job {
    /// One operation, called `rounds` times in a row; result: total seconds.
    Operation {
        /// Name, as in `comm-bench --ops`.
        name: String,
        /// Size of the whole buffer, in bytes: for operations with parts, of the parts of all ranks.
        bytes: usize,
        /// Number of calls.
        rounds: u64,
    },
    /// Operations measured as `comm-bench` does, with a barrier before each call; result: a [`Row`] for each.
    Table {
        /// Operations and sizes.
        cases: Vec<(String, usize)>,
        /// Approximate measuring time of each, in seconds.
        seconds: f64,
    },
    /// Training steps; result: [`workload::Figures`], with those of each rank.
    Train(Training),
}

/// The processes that run a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ranks {
    /// Number of ranks.
    pub world_size: usize,
    /// Transport between them.
    pub transport: Transport,
    /// Threads per rank.
    pub threads: usize,
}

impl Ranks {
    /// Returns a configuration of ranks with one thread each, with shared memory where possible.
    pub fn new(world_size: usize) -> Self {
        Self { world_size, transport: Transport::Auto, threads: 1 }
    }

    /// Starts the ranks for a job; returns what rank 0 handed over.
    ///
    /// # Errors
    /// Ranks that cannot be started, or fail.
    pub fn run<T: DeserializeOwned>(&self, job: &Job) -> Result<T> {
        let job = serde_json::to_string(job).map_err(unreadable)?;
        let env: Vec<(OsString, OsString)> = vec![
            (JOB.into(), job.into()),
            ("GIRANDOLE_TRANSPORT".into(), self.transport.to_string().into()),
            (cli::threads::VARIABLE.into(), self.threads.to_string().into()),
        ];
        let (world_size, args) = (self.world_size, Some(Vec::new()));
        handed_over(launch::spawn(&SpawnConfig { world_size, args, env, ..SpawnConfig::default() })?)
    }

    /// Runs training steps.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn train(&self, training: &Training) -> Result<Figures> {
        self.run(&Job::Train(training.clone()))
    }

    /// Returns the time from the call to the end of rank 0's first training step.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn to_first_step(&self, training: &Training) -> Result<Duration> {
        let began = clock::now();
        let first = self.train(training)?.first_step_at;
        Ok(Duration::from_nanos(first.saturating_sub(began)))
    }

    /// Returns the time of `rounds` consecutive calls.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn time(&self, operation: &str, bytes: usize, rounds: u64) -> Result<Duration> {
        let seconds: f64 = self.run(&Job::Operation { name: operation.into(), bytes, rounds })?;
        Ok(Duration::from_secs_f64(seconds))
    }
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::NoResult { reason: error.to_string() }
}

/// Runs the job if this process is a rank of [`Ranks::run`]; returns its exit code, or `None` in any other process.
pub fn serve() -> Option<ExitCode> {
    let text = std::env::var(JOB).ok()?;
    let done = launch::worker_guard().map_err(Error::from).and_then(|()| run(&text));
    let Err(error) = done else { return Some(ExitCode::SUCCESS) };
    if let Some(message) = error.message() {
        eprintln!("{message}");
    }
    Some(ExitCode::from(error.exit_code()))
}

fn run(job: &str) -> Result<()> {
    let job: Job = serde_json::from_str(job).map_err(unreadable)?;
    let comm = Tcp::connect(&TcpConfig::from_env()?)?;
    match job {
        Job::Operation { name, bytes, rounds } => report(&comm, &calls(&comm, &name, bytes, rounds)?),
        Job::Table { cases, seconds } => {
            let budget = Duration::from_secs_f64(seconds);
            let case = |(name, bytes): &(String, usize)| {
                Ok(measure(&comm, operation(name)?, *bytes, (DType::F32, &Device::Cpu), None, budget)?)
            };
            report(&comm, &cases.iter().map(case).collect::<Result<Vec<Row>>>()?)
        }
        Job::Train(training) => {
            let first = comm.rank() == 0;
            let figures = workload::run(&training, comm)?;
            if first { hand_over(&figures) } else { Ok(()) }
        }
    }
}

fn report<T: Serialize>(comm: &Tcp, result: &T) -> Result<()> {
    if comm.rank() == 0 { hand_over(result) } else { Ok(()) }
}

fn calls(comm: &Tcp, name: &str, bytes: usize, rounds: u64) -> Result<f64> {
    let operation = operation(name)?.operation(comm, bytes, (DType::F32, &Device::Cpu))?;
    for _ in 0..rounds.min(WARM_UP) {
        comm.run(operation.clone())?;
    }
    comm.run(Operation::Barrier)?;
    let began = Instant::now();
    for _ in 0..rounds {
        comm.run(operation.clone())?;
    }
    Ok(began.elapsed().as_secs_f64())
}

fn operation(name: &str) -> Result<Measured> {
    Measured::named(name).ok_or_else(|| Error::NoResult { reason: format!("there is no operation {name}") })
}
