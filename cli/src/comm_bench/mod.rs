//! `comm-bench`: measures the time of collectives by size (from the PyTorch handbook).

mod options;

pub use options::CommBenchOptions;

use std::path::Path;

use crate::backends;
use crate::console::{note, say};
use crate::error::{Error, Result};
use crate::outputs::{self, check_in_place};
use crate::same_options::agree_on_options;
use crate::start::{self, Start};
use training::FileError;

use candle_core::Device;
use comm::{Communicator, TcpConfig};
use plan::measure::{Measured, Row, measure, size};
use report::{counted, trace};

/// The command's name.
pub const NAME: &str = "comm-bench";
const WORLD_SIZE: usize = 2;

/// Runs the command: starts the ranks, or measures as one of them.
///
/// # Errors
/// A wrong option, a file that cannot be written, a rank that failed.
pub fn run(options: &CommBenchOptions) -> Result<()> {
    let start = Start::find(&options.ranks, NAME, WORLD_SIZE)?;
    options.check(match &start {
        Start::Launcher { world_size } => *world_size,
        Start::Rank { config, .. } => config.world_size,
    })?;
    options.ranks.check_device(options.device)?;
    options.json.as_deref().map_or(Ok(()), check_in_place)?;
    trace::install(false)?;
    match start {
        Start::Launcher { world_size } => start::spawn::<()>(NAME, world_size, options.ranks.grace),
        Start::Rank { config, spawned } => {
            let in_rank = |source| Error::in_rank(config.rank, source);
            rank(options, &config, spawned).map_err(in_rank)
        }
    }
}

fn rank(options: &CommBenchOptions, config: &TcpConfig, spawned: bool) -> Result<()> {
    let device = options.ranks.device(options.device)?;
    let comm = backends::connect(options.ranks.backend, &device, config)?;
    let comm = &*comm;
    agree_on_options(comm, &[], Vec::new)?;
    let first = comm.rank() == 0;
    if first {
        if options.ops.contains(&Measured::SendRecv) && comm.world_size() == 1 {
            note(format_args!("send_recv is not measured: it takes 2 ranks or more"));
        }
        say(format_args!("{}", heading(options, comm, &device)))?;
    }
    let mut rows = Vec::new();
    for (op, bytes) in options.cases(comm.world_size()) {
        let row = measure(comm, op, bytes, (options.dtype, &device), options.calls, options.seconds)?;
        if first {
            say(format_args!("{}", line(&row)))?;
        }
        rows.push(row);
    }
    if !first {
        return Ok(());
    }
    if let Some(path) = &options.json {
        write(path, &rows)?;
    }
    if spawned { start::hand_over(&()) } else { Ok(()) }
}

fn heading(options: &CommBenchOptions, comm: &dyn Communicator, device: &Device) -> String {
    let (world_size, shared) = (comm.world_size(), comm.shared_memory_ranks().len());
    let carrier = match shared {
        _ if comm.backend() != "tcp" => format!("through {}", comm.backend().to_uppercase()),
        0 => "over TCP".into(),
        _ if shared + 1 == world_size => "through shared memory".to_string(),
        _ => format!("rank 0 has {shared} of its peers in shared memory, the others over TCP"),
    };
    let (op, bytes, time) = ("operation", "size", "median");
    let place = match device {
        Device::Cpu => "",
        Device::Cuda(_) => " of a CUDA device",
        Device::Metal(_) => " of a Metal device",
    };
    let what = format!("{} {carrier}, {}{place}", counted(world_size, "rank"), options.dtype.as_str());
    format!("{what}\n{op:<15}{bytes:>10}{:>8}{time:>13}{:>10}{:>10}", "calls", "GB/s", "bus GB/s")
}

fn line(row: &Row) -> String {
    let Row { op, bytes, calls, gb_s, bus_gb_s, .. } = row;
    let (size, time) = (size::format(*bytes), time(row.s));
    format!("{op:<15}{size:>10}{calls:>8}{time:>13}{gb_s:>10.3}{bus_gb_s:>10.3}")
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1e-3 => format!("{:.2} us", s * 1e6),
        s if s < 1.0 => format!("{:.3} ms", s * 1e3),
        s => format!("{s:.3} s"),
    }
}

fn write(path: &Path, rows: &[Row]) -> Result<()> {
    let mut lines = Vec::new();
    for row in rows {
        serde_json::to_writer(&mut lines, row).map_err(|error| FileError::write(path, error))?;
        lines.push(b'\n');
    }
    Ok(outputs::write(path, lines)?)
}
