//! A pipeline stage that is killed.

use std::fs::File;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, all_name_the_culprit};
use crate::pipeline_transformer::PIPELINE;

/// Limit until all other ranks detect the failure (it takes milliseconds).
const SOON: Duration = Duration::from_secs(1);
const LIMIT: Duration = Duration::from_secs(120);

/// A launcher that is killed, with its ranks, when a test fails.
struct Launcher(Child);

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the ranks of a launcher, by rank.
fn ranks(launcher: u32) -> Vec<Pid> {
    let children =
        std::fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children")).unwrap_or_default();
    let mut found: Vec<(usize, Pid)> = children
        .split_whitespace()
        .filter_map(|pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
            let rank = environment.split(|byte| *byte == 0).find_map(|line| line.strip_prefix(b"RANK="))?;
            let rank = String::from_utf8_lossy(rank).parse().ok()?;
            Some((rank, Pid::from_raw(pid.parse().ok()?)?))
        })
        .collect();
    found.sort_by_key(|(rank, _)| *rank);
    found.into_iter().map(|(_, pid)| pid).collect()
}

#[test]
fn a_stage_that_is_killed_is_named_by_all_others() {
    let mut times = Vec::new();
    for (schedule, victim) in [("gpipe", 0), ("1f1b", 1), ("zb-h1", 2), ("1f1b", 3), ("zb-v", 1)] {
        let folder = Folder::new();
        let (metrics, errors) = (folder.path("m.jsonl"), folder.path("stderr"));
        let mut command = PIPELINE.command();
        command.args([
            "--world-size",
            "4",
            "--epochs",
            "1000000",
            "--num-layers",
            "6",
            "--micro-batches",
            "4",
        ]);
        command.args(["--schedule", schedule, "--metrics", metrics.to_str().unwrap()]);
        command.stdout(Stdio::null()).stderr(File::create(&errors).unwrap());
        let mut launcher = Launcher(command.spawn().unwrap());
        let began = Instant::now();
        while !std::fs::read_to_string(&metrics).is_ok_and(|text| text.contains("step")) {
            assert!(began.elapsed() < LIMIT, "it does not begin");
            assert!(
                launcher.0.try_wait().unwrap().is_none(),
                "{}",
                std::fs::read_to_string(&errors).unwrap()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
        let ranks = ranks(launcher.0.id());
        assert_eq!(ranks.len(), 4);
        kill_process(ranks[victim], Signal::KILL).unwrap();
        let began = Instant::now();
        let status = loop {
            if let Some(status) = launcher.0.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < LIMIT, "{schedule}: it does not end");
            std::thread::sleep(Duration::from_millis(2));
        };
        times.push(began.elapsed());
        assert_eq!(status.code(), Some(1));
        let errors = std::fs::read_to_string(&errors).unwrap();
        assert!(errors.contains(&format!("error: rank {victim} (pid ")), "{errors}");
        for other in (0..4).filter(|other| *other != victim) {
            let line = errors.lines().find(|line| line.starts_with(&format!("rank {other}: error: ")));
            let line = line.unwrap_or_else(|| panic!("{schedule}: rank {other} says nothing:\n{errors}"));
            assert!(line.contains(&format!("rank {victim} (host ")), "{schedule}: {line}");
        }
    } // The median: in a single round the machine may have been busy.
    times.sort();
    assert!(times[times.len() / 2] < SOON, "it took {times:?}");
}

/// Each stage waits for its neighbours, and these for theirs, in groups of two ranks.
#[test]
fn a_stage_that_is_killed_or_stopped_is_named_by_all_others() {
    for (seed, schedule) in [(1, "gpipe"), (2, "1f1b"), (3, "zb-v")] {
        let arguments = ["--num-layers", "6", "--micro-batches", "4", "--schedule", schedule];
        all_name_the_culprit(&PIPELINE, &arguments, seed, 2);
    }
}

/// With two copies of each stage.
#[test]
fn a_copy_of_a_stage_that_is_killed_or_stopped_is_named_by_all_others() {
    let arguments = ["--num-layers", "4", "--micro-batches", "2", "--dp", "2", "--samples", "16"];
    all_name_the_culprit(&PIPELINE, &arguments, 4, 4);
}
