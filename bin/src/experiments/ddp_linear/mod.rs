//! `ddp-linear`, document 002: one process against data-parallel ranks, and the true speed-up.

mod data;
mod ddp;
mod options;
mod single;
mod training;

pub use options::DdpLinearOptions;

use comm::TcpConfig;

use crate::console::{note, say};
use crate::error::Result;
use crate::metrics::MetricsWriter;
use crate::report::{RankTimes, Report, RunSeries, Speedup, now_rfc3339};
use crate::start::{self, Start};
use crate::trace;

use self::ddp::DdpResult;

/// Runs the experiment: all of it, or this rank's part.
///
/// # Errors
/// A wrong option, a file that cannot be used, a rank that failed.
pub fn run(options: &DdpLinearOptions) -> Result<()> {
    match Start::find(&options.common, 2)? {
        Start::Launcher { world_size } => {
            trace::install(false)?;
            options.check(world_size)?;
            let (mut metrics, single) = begin(options, world_size)?;
            if let Some(metrics) = &mut metrics {
                // The ranks go on in the same file.
                metrics.flush()?;
            }
            announce(options, world_size)?;
            conclude(options, single, start::spawn(world_size)?)
        }
        Start::Rank { config, spawned } => run_rank(options, &config, spawned),
    }
}

fn run_rank(options: &DdpLinearOptions, config: &TcpConfig, spawned: bool) -> Result<()> {
    let recorder = trace::install(options.common.trace.is_some())?;
    let first = config.rank == 0;
    if spawned {
        let path = options.common.metrics.as_ref().filter(|_| first);
        let mut metrics = path.map(|path| MetricsWriter::append(path)).transpose()?;
        let result = ddp::run(options, config, metrics.as_mut(), recorder)?;
        return if first { start::hand_over(&result) } else { Ok(()) };
    }
    options.check(config.world_size)?;
    // The others wait at the meeting point while this rank trains alone.
    let (mut metrics, single) = match first {
        true => begin(options, config.world_size).map(|(metrics, single)| (metrics, Some(single)))?,
        false => (None, None),
    };
    if first {
        announce(options, config.world_size)?;
    }
    let result = ddp::run(options, config, metrics.as_mut(), recorder)?;
    single.map_or(Ok(()), |single| conclude(options, single, result))
}

/// What the document does before it turns to several ranks.
fn begin(options: &DdpLinearOptions, world_size: usize) -> Result<(Option<MetricsWriter>, RunSeries)> {
    let mut metrics = options.common.metrics.as_ref().map(|path| MetricsWriter::create(path)).transpose()?;
    if world_size > 1 && !options.keep_total_batch {
        note(format_args!(
            "the document means to keep the total batch size, but keeps that of each rank; so does this run. \
             --keep-total-batch does as the document says"
        ));
    }
    say(format_args!("available GPUs: 0"))?;
    let single = single::run(options, metrics.as_mut())?;
    Ok((metrics, single))
}

fn announce(options: &DdpLinearOptions, world_size: usize) -> Result<()> {
    let total = options.rank_batch_size(world_size) * world_size;
    let ranks = if world_size == 1 { "rank" } else { "ranks" };
    say(format_args!("\n===== DDP training ({world_size} {ranks}, total batch size {total}) ====="))
}

/// The comparison, which the document had to leave out, and the report.
fn conclude(options: &DdpLinearOptions, single: RunSeries, result: DdpResult) -> Result<()> {
    let world_size = result.ranks.len();
    let speedup = single.seconds / result.seconds;
    say(format_args!("\n===== comparison ====="))?;
    say(format_args!("single-process training time: {:.3} s", single.seconds))?;
    say(format_args!("DDP training time with {world_size} ranks: {:.3} s", result.seconds))?;
    say(format_args!("speed-up: {speedup:.2}x (ideal: {world_size}.00x)"))?;
    let Some(path) = &options.common.report else { return Ok(()) };
    let steps = result.losses.len().max(1) as f64;
    let times = |(rank, summary): (usize, &ddp::RankSummary)| RankTimes {
        rank,
        compute_s: (summary.seconds - summary.communication_s).max(0.0) / steps,
        communication_s: summary.communication_s / steps,
        peak_rss_bytes: summary.peak_rss_bytes,
    };
    let report = Report {
        title: "ddp-linear".into(),
        command_line: std::env::args().collect::<Vec<_>>().join(" "),
        date: now_rfc3339(),
        host: start::host_name(),
        facts: vec![
            ("samples".into(), options.samples.to_string()),
            ("batch size of a rank".into(), options.rank_batch_size(world_size).to_string()),
            ("learning rate with DDP".into(), options.ddp_lr(world_size).to_string()),
            ("seed".into(), options.common.seed.to_string()),
        ],
        ranks: result.ranks.iter().enumerate().map(times).collect(),
        speedup: Some(Speedup { single_s: single.seconds, ddp_s: result.seconds, ranks: world_size }),
        runs: vec![
            single,
            RunSeries {
                name: format!("DDP, {world_size} ranks"),
                losses: result.losses,
                seconds: result.seconds,
                world_size,
                steps_per_epoch: result.steps_per_epoch,
            },
        ],
    };
    Ok(report.write(path)?)
}
