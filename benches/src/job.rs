//! Measurements that need several processes.

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use comm::launch::{self, SpawnConfig};
use comm::{Communicator, Operation, ReduceOp, Tcp, TcpConfig, Transport};

const JOB: &str = "GIRANDOLE_BENCH_JOB";

/// What ranks do over and over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Job {
    /// `all_reduce` with sum over f32.
    AllReduce {
        /// Size of the tensor.
        bytes: usize,
    },
    /// A barrier.
    Barrier,
}

impl Job {
    fn operation(self) -> comm::Result<Operation> {
        Ok(match self {
            Job::AllReduce { bytes } => {
                let tensor = Tensor::zeros(bytes / size_of::<f32>(), DType::F32, &Device::Cpu)?;
                Operation::AllReduce { tensor, op: ReduceOp::Sum }
            }
            Job::Barrier => Operation::Barrier,
        })
    }

    fn to_text(self) -> String {
        match self {
            Job::AllReduce { bytes } => format!("all_reduce:{bytes}"),
            Job::Barrier => "barrier:0".into(),
        }
    }

    fn from_text(text: &str) -> Option<Self> {
        match text.split_once(':')? {
            ("all_reduce", bytes) => Some(Job::AllReduce { bytes: bytes.parse().ok()? }),
            ("barrier", _) => Some(Job::Barrier),
            _ => None,
        }
    }
}

/// The time that `world_size` processes take to do a job `rounds` times, as rank 0 sees it.
///
/// # Errors
/// Ranks that cannot be started, or fail.
pub fn measure(job: Job, transport: Transport, world_size: usize, rounds: u64) -> comm::Result<Duration> {
    let env: Vec<(OsString, OsString)> = vec![
        (JOB.into(), format!("{} {rounds}", job.to_text()).into()),
        ("GIRANDOLE_TRANSPORT".into(), transport.to_string().into()),
    ];
    let results =
        launch::spawn(&SpawnConfig { world_size, args: Some(Vec::new()), env, ..SpawnConfig::default() })?;
    let nanoseconds = results.into_iter().next().flatten().and_then(|text| text.parse().ok()).unwrap_or(0);
    Ok(Duration::from_nanos(nanoseconds))
}

/// Does a rank's part, where this process is a rank of [`measure`].
pub fn serve() -> Option<ExitCode> {
    let text = std::env::var(JOB).ok()?;
    let (job, rounds) = text.split_once(' ')?;
    let (job, rounds) = (Job::from_text(job)?, rounds.parse().ok()?);
    Some(match run(job, rounds) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    })
}

fn run(job: Job, rounds: u64) -> comm::Result<()> {
    launch::worker_guard()?;
    let comm = Tcp::connect(&TcpConfig::from_env()?)?;
    let operation = job.operation()?;
    for _ in 0..rounds.min(20) {
        comm.run(operation.clone())?;
    }
    comm.run(Operation::Barrier)?;
    let began = Instant::now();
    for _ in 0..rounds {
        comm.run(operation.clone())?;
    }
    let nanoseconds = began.elapsed().as_nanos();
    if comm.rank() == 0 { launch::report_result(&nanoseconds.to_string()) } else { Ok(()) }
}
