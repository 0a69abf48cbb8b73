//! What ranks are started for, and how: this program starts itself again.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use bin::comm_bench::{Measured, Row, measure};
use bin::error::{Error, Result};
use bin::start::{hand_over, handed_over};
use candle_core::{DType, Device};
use comm::{Communicator, Operation, Tcp, TcpConfig, Transport};
use launch::SpawnConfig;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::workload::{self, Figures, Training};

const JOB: &str = "GIRANDOLE_BENCH_JOB";
/// Calls before those that are measured.
const WARM_UP: u64 = 5;

/// What ranks do. Rank 0 hands over what came of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Job {
    /// One operation, so many times one after the other: seconds of all of them.
    Operation {
        /// As `comm-bench --ops` calls it.
        name: String,
        /// Size of the buffer, of all parts together.
        bytes: usize,
        /// How often.
        rounds: u64,
    },
    /// Operations as `comm-bench` measures them, with a barrier before each call: a [`Row`] for each.
    Table {
        /// Operations and sizes.
        cases: Vec<(String, usize)>,
        /// For about how long each is measured.
        seconds: f64,
    },
    /// Steps of training: [`workload::Figures`] of each rank.
    Train(Training),
}

/// Which processes do a job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ranks {
    /// How many.
    pub world_size: usize,
    /// What carries their data.
    pub transport: Transport,
    /// Threads of each.
    pub threads: usize,
}

impl Ranks {
    /// So many ranks of one thread each, through shared memory where there is any.
    pub fn new(world_size: usize) -> Self {
        Self { world_size, transport: Transport::Auto, threads: 1 }
    }

    /// Starts them for a job; what rank 0 handed over.
    ///
    /// # Errors
    /// Ranks that cannot be started, or fail.
    pub fn run<T: DeserializeOwned>(&self, job: &Job) -> Result<T> {
        let job = serde_json::to_string(job).map_err(unreadable)?;
        let env: Vec<(OsString, OsString)> = vec![
            (JOB.into(), job.into()),
            ("GIRANDOLE_TRANSPORT".into(), self.transport.to_string().into()),
            (bin::threads::VARIABLE.into(), self.threads.to_string().into()),
        ];
        let (world_size, args) = (self.world_size, Some(Vec::new()));
        handed_over(launch::spawn(&SpawnConfig { world_size, args, env, ..SpawnConfig::default() })?)
    }

    /// Steps of training.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn train(&self, training: &Training) -> Result<Figures> {
        self.run(&Job::Train(training.clone()))
    }

    /// The time from the call to the end of rank 0's first step of training.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn to_first_step(&self, training: &Training) -> Result<Duration> {
        let began = clock::now();
        let first = self.train(training)?.first_step_at;
        Ok(Duration::from_nanos(first.saturating_sub(began)))
    }

    /// The time of `rounds` calls, one after the other.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn time(&self, operation: &str, bytes: usize, rounds: u64) -> Result<Duration> {
        let seconds: f64 = self.run(&Job::Operation { name: operation.into(), bytes, rounds })?;
        Ok(Duration::from_secs_f64(seconds))
    }
}

fn unreadable(error: serde_json::Error) -> Error {
    Error::NoResult { reason: error.to_string() }
}

/// Does a rank's part, where this process is a rank of [`Ranks::run`].
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
                measure(&comm, operation(name)?, *bytes, (DType::F32, &Device::Cpu), None, budget)
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
    let known = Measured::ALL.into_iter().find(|operation| operation.name() == name);
    known.ok_or_else(|| Error::NoResult { reason: format!("there is no operation {name}") })
}
