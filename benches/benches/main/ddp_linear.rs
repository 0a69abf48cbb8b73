//! Benchmarks of `ddp-linear`: the whole command, and its training loops as timed in its metrics.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use criterion::BenchmarkId;

use crate::group::Group;

pub(crate) const COMMAND: &str = "ddp-linear";
/// Environment variable set in processes that run the command. Arguments cannot tell, as the benchmark group has the
/// same name.
const MEASURED: &str = "GIRANDOLE_BENCH_COMMAND";

/// Whether this process runs the command for [`bench`].
pub(crate) fn is_measured() -> bool {
    std::env::var_os(MEASURED).is_some()
}

pub(crate) fn bench(group: &mut Group<'_>) {
    for ranks in [1, 2, 4] {
        group.bench_function(BenchmarkId::new("whole command", format!("{ranks} ranks")), |bencher| {
            bencher.iter(|| run(ranks, &[]));
        });
    }
    for (run_name, ranks) in [("single", 2), ("ddp", 2), ("ddp", 4)] {
        let name = BenchmarkId::new(format!("training loop, {run_name}"), format!("{ranks} ranks"));
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| (0..rounds).map(|_| loop_time(run_name, ranks)).sum());
        });
    }
}

fn run(ranks: usize, more: &[&str]) -> Duration {
    let program = std::env::current_exe().expect("this program has a path");
    let began = Instant::now();
    let status = Command::new(program)
        .args([COMMAND, "--world-size", &ranks.to_string()])
        .args(more)
        .env(MEASURED, COMMAND)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("this program starts");
    assert!(status.success(), "{COMMAND} with {ranks} ranks: {status}");
    began.elapsed()
}

/// Returns the time of one training loop, from the summary in the metrics.
fn loop_time(run_name: &str, ranks: usize) -> Duration {
    let path = std::env::temp_dir().join(format!("girandole-bench-{}.jsonl", std::process::id()));
    run(ranks, &["--metrics", path.to_str().expect("a plain path")]);
    let text = std::fs::read_to_string(&path).expect("metrics were written");
    std::fs::remove_file(&path).expect("metrics can be removed");
    let lines = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let summary = lines.into_iter().find(|line| line["event"] == "summary" && line["run"] == run_name);
    Duration::from_secs_f64(summary.and_then(|line| line["seconds"].as_f64()).expect("a summary of the run"))
}
