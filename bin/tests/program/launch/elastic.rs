//! Elastic jobs: continuing without some ranks or a whole node, and cases where that is impossible.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, free_port, girandole, losses, succeed, text};
use crate::launch::nodes::{LIMIT, Nodes, last_line};
use crate::launch::shell::ranks_of;

const RUN: [&str; 6] = ["ddp-transformer", "--samples", "40", "--reshuffle", "--lr", "0.001"];
/// 500 steps of 4 ranks: longer than tests need that do not say so.
const EPOCHS: [&str; 2] = ["--epochs", "100"];

/// A run under observation.
struct Run {
    nodes: Nodes,
    folder: Folder,
}

impl Run {
    /// Starts two ranks on each of two nodes.
    fn on_two_nodes(options: &[&str], more: &[&str]) -> Self {
        let folder = Folder::new();
        let program = [vec!["girandole".to_string()], run(&folder, more)].concat();
        let program: Vec<&str> = program.iter().map(String::as_str).collect();
        Self { nodes: Nodes::start(options, &program), folder }.at_work()
    }

    fn on_one_node(options: &[&str], more: &[&str]) -> Self {
        let folder = Folder::new();
        let mut command = girandole();
        command.arg("launch").args(options).args(["--", "girandole"]).args(run(&folder, more));
        let launcher = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self { nodes: Nodes(vec![launcher]), folder }.at_work()
    }

    /// Waits until it has taken some steps.
    fn at_work(self) -> Self {
        let began = Instant::now();
        while steps(&self.folder.path("m.jsonl")) < 60 {
            assert!(began.elapsed() < LIMIT, "no steps");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        self
    }

    /// Waits for `more` further steps.
    fn more(&self, more: usize) {
        let path = self.folder.path("m.jsonl");
        let (now, began) = (steps(&path), Instant::now());
        while steps(&path) < now + more {
            assert!(began.elapsed() < LIMIT, "no steps");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn kill(&self, rank: usize) {
        kill_process(self.nodes.0.iter().find_map(|node| rank_of(node, rank)).unwrap(), Signal::KILL)
            .unwrap();
    }

    fn signal(&self, node: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.nodes.0[node]), signal).unwrap();
    }

    fn end(self) -> (Vec<Output>, Folder) {
        (self.nodes.end(), self.folder)
    }
}

/// Returns the arguments of a run that writes its files to this folder.
fn run(folder: &Folder, more: &[&str]) -> Vec<String> {
    let files =
        ["--metrics".to_string(), folder.argument("m.jsonl"), "--save".into(), folder.argument("saved")];
    let epochs = if more.contains(&EPOCHS[0]) { &[][..] } else { &EPOCHS };
    RUN.iter().chain(epochs).chain(more).map(ToString::to_string).chain(files).collect()
}

fn steps(path: &Path) -> usize {
    std::fs::read(path).map_or(0, |text| text.iter().filter(|byte| **byte == b'\n').count())
}

/// Returns the process of a rank, if this launcher has it.
pub(crate) fn rank_of(launcher: &Child, rank: usize) -> Option<Pid> {
    let wanted = format!("RANK={rank}");
    let is_it = |pid: &Pid| {
        let environment = std::fs::read(format!("/proc/{}/environ", pid.as_raw_pid())).unwrap_or_default();
        environment.split(|&byte| byte == 0).any(|variable| variable == wanted.as_bytes())
    };
    ranks_of(launcher).into_iter().find(is_it)
}

/// Checks that it succeeded, that the metrics have each step once, and that the loss has fallen.
fn ended_well(output: &Output, folder: &Folder) {
    assert!(output.status.success(), "{}", text(&output.stderr));
    let losses = losses(&folder.path("m.jsonl"));
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (first, last) = (mean(&losses[..60]), mean(&losses[losses.len() - 60..]));
    assert!(last < first, "the loss has not fallen: {first}, {last}");
    assert!(folder.path("saved").exists());
}

#[test]
fn the_others_go_on_without_a_rank_be_it_the_first() {
    for lost in [0, 2] {
        let folder = Folder::new();
        let report = folder.argument("report.html");
        let run = Run::on_one_node(&["--nproc-per-node", "3", "--elastic", "2:3"], &["--report", &report]);
        run.kill(lost);
        let (outputs, folder) = run.end();
        let remarks = text(&outputs[0].stderr);
        let said = "was killed by signal SIGKILL; the others go on, 2 in all";
        assert!(remarks.contains(&format!("rank {lost} (pid ")) && remarks.contains(said), "{remarks}");
        assert!(remarks.contains("2 ranks of 3 go on at epoch "), "{remarks}");
        ended_well(&outputs[0], &folder);
        // Written by the rank that has replaced the first one.
        assert!(std::fs::read_to_string(report).unwrap().contains("</html>"));
    }
}

#[test]
fn before_the_first_step_the_others_begin_anew() {
    for lost in [0, 1] {
        let folder = Folder::new();
        let rows = ["--samples", "2500", "--vocab-size", "2500"];
        let train =
            [&["ddp-transformer"], &rows[..], &["--epochs", "1", "--batch-size", "200", "--save"]].concat();
        let mut command = girandole();
        command.args(["launch", "--nproc-per-node", "3", "--elastic", "2:3", "--", "girandole"]).args(&train);
        command.arg(folder.argument("saved")).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut job = Nodes(vec![command.spawn().unwrap()]);
        // The first rank prints all rows, which is more than a pipe holds: it blocks until they are read.
        let mut lines = BufReader::new(job.0[0].stdout.take().unwrap());
        lines.read_line(&mut String::new()).unwrap();
        kill_process(rank_of(&job.0[0], lost).unwrap(), Signal::KILL).unwrap();
        lines.read_to_end(&mut Vec::new()).unwrap();
        let output = job.end().remove(0);
        let remarks = text(&output.stderr);
        assert!(output.status.success(), "{remarks}");
        assert!(remarks.contains("2 of the ranks start again, before the first step"), "{remarks}");
        succeed(girandole().args(&train).args([&folder.argument("whole"), "--world-size", "2"]));
        let weights = ["saved", "whole"].map(|name| std::fs::read(folder.path(name)).unwrap());
        assert!(weights[0] == weights[1], "other weights than those of 2 ranks: {remarks}");
    }
}

#[test]
fn a_rank_of_one_node_and_then_all_of_it() {
    let run = Run::on_two_nodes(&["--elastic", "2:4"], &[]);
    run.kill(3);
    run.more(40);
    run.signal(1, Signal::KILL);
    let (outputs, folder) = run.end();
    let remarks = text(&outputs[0].stderr);
    for part in [
        "rank 3 (pid ",
        "was killed by signal SIGKILL; the others go on, 3 in all",
        "3 ranks of 4 go on at epoch ",
        "node 1 (host ",
        ") is gone; the others go on, 2 in all",
        "2 ranks of 3 go on at epoch ",
    ] {
        assert!(remarks.contains(part), "{part}: {remarks}");
    }
    ended_well(&outputs[0], &folder);
}

/// After the rendezvous, ranks continue without one that dies, whichever launcher learns of it first.
#[test]
fn a_rank_that_dies_before_its_launcher_has_heard_that_all_have_met() {
    for round in 0..6 {
        let folder = Folder::new();
        let program = [vec!["girandole".to_string()], run(&folder, &[])].concat();
        let program: Vec<&str> = program.iter().map(String::as_str).collect();
        let nodes = Nodes::start(&["--elastic", "2:4"], &program);
        nodes.ranks();
        let run = Run { nodes, folder };
        run.signal(1, Signal::STOP);
        let run = run.at_work();
        run.kill(2 + round % 2);
        run.more(10);
        run.signal(1, Signal::CONT);
        let (outputs, folder) = run.end();
        outputs.iter().for_each(|output| ended_well(output, &folder));
    }
}

#[test]
fn all_ranks_of_the_first_node() {
    let run = Run::on_two_nodes(&["--elastic", "1:4"], &[]);
    run.kill(0);
    run.kill(1);
    let (outputs, folder) = run.end();
    for output in &outputs {
        let remarks = text(&output.stderr);
        assert!(remarks.contains("the others go on, 3 in all"), "{remarks}");
        assert!(remarks.contains("the others go on, 2 in all"), "{remarks}");
        ended_well(output, &folder);
    }
    // The third rank is the reporter now.
    assert!(text(&outputs[1].stdout).contains("Epoch 99, "), "{}", text(&outputs[1].stderr));
}

#[test]
fn a_launcher_that_is_stopped_leaves_with_its_ranks() {
    let run = Run::on_two_nodes(&["--elastic", "2:4"], &[]);
    run.signal(1, Signal::TERM);
    let (outputs, folder) = run.end();
    assert_eq!(outputs[1].status.code(), Some(128 + 15), "{}", text(&outputs[1].stderr));
    let remarks = text(&outputs[0].stderr);
    assert!(remarks.contains("has left: stopped by SIGTERM; the others go on, 2 in all"), "{remarks}");
    ended_well(&outputs[0], &folder);
}

#[test]
fn with_a_folder_for_checkpoints_it_leaves_after_one() {
    let kept = Folder::new();
    let dir = kept.argument("ck");
    let keep = ["--epochs", "1000000", "--checkpoint-dir", &dir, "--checkpoint-every", "1000000"];
    let mut run = Run::on_two_nodes(&["--elastic", "2:4"], &keep);
    run.signal(1, Signal::TERM);
    run.nodes.0[1].wait().unwrap();
    let latest = || std::fs::read(kept.path("ck/latest")).unwrap();
    let of_all = latest();
    run.more(60);
    run.signal(0, Signal::TERM);
    let (outputs, _) = run.end();
    for output in &outputs {
        assert_eq!(output.status.code(), Some(85), "{}", text(&output.stderr));
    }
    let remarks = text(&outputs[0].stderr);
    assert!(remarks.contains("has left: stopped with a checkpoint"), "{remarks}");
    assert!(remarks.contains("note: stopped by SIGTERM after step ") && latest() != of_all, "{remarks}");
}

#[test]
fn with_too_few_the_job_ends_with_the_first_cause() {
    let run = Run::on_two_nodes(&["--elastic", "4:4"], &[]);
    run.kill(2);
    let (outputs, _) = run.end();
    for output in outputs {
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(128 + 9), "{remarks}");
        let (_, last) = remarks.split_once("error: rank 2 (pid ").unwrap();
        assert!(
            last.contains(", node 1, host ") && last.contains("was killed by signal SIGKILL"),
            "{remarks}"
        );
    }
}

#[test]
fn with_too_few_all_start_again_as_often_as_they_may() {
    let dir = Folder::new();
    let checkpoints = dir.argument("checkpoints");
    let keep = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "20"];
    let run = Run::on_one_node(&["--nproc-per-node", "3", "--elastic", "2:3", "--max-restarts", "1"], &keep);
    run.kill(1);
    run.more(40);
    run.kill(2);
    let (outputs, folder) = run.end();
    let remarks = text(&outputs[0].stderr);
    assert!(remarks.contains("the others go on, 2 in all"), "{remarks}");
    let again = "was killed by signal SIGKILL; all ranks start again (restart 1 of 1)";
    assert!(remarks.contains(again), "{remarks}");
    assert!(remarks.contains("going on from "), "{remarks}");
    ended_well(&outputs[0], &folder);
}

#[test]
fn without_the_first_launcher_the_job_ends() {
    let run = Run::on_two_nodes(&["--elastic", "1:4"], &[]);
    run.signal(0, Signal::KILL);
    let (outputs, _) = run.end();
    assert_eq!(outputs[1].status.code(), Some(1));
    let last = last_line(&outputs[1]);
    assert!(last.starts_with("error: node 0 (host ") && last.contains("is gone"), "{last}");
}

#[test]
fn programs_that_cannot_go_on_end_as_without_it() {
    let launch = |program: &[&str]| {
        let mut command = girandole();
        command.args(["launch", "--nproc-per-node", "3", "--elastic", "1:3", "--"]).args(program);
        command.output().unwrap()
    };
    let script = "[ $RANK = 1 ] || exec sleep 1000; echo $GIRANDOLE_ELASTIC $GIRANDOLE_ELASTIC_MIN; exit 3";
    let output = launch(&["sh", "-c", script]);
    let remarks = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(3), "1 1\n"), "{remarks}");
    assert!(remarks.starts_with("error: rank 1 (pid "), "{remarks}");

    // A rank that kills itself during training.
    let script = "[ $RANK = 1 ] && { sleep 1; kill -9 $$; } & exec girandole ddp-linear --epochs 100000";
    let own = Path::new(env!("CARGO_BIN_EXE_girandole")).parent().unwrap().to_str().unwrap();
    let output = launch(&["sh", "-c", &format!("PATH={own}:$PATH; {script}")]);
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(128 + 9), "{remarks}");
    assert!(!remarks.contains("go on") && remarks.contains("error: rank 1 (pid "), "{remarks}");
}

#[test]
fn ranks_that_were_started_one_by_one_can_as_well() {
    let (folder, port) = (Folder::new(), free_port().to_string());
    let start = |rank: usize| {
        let mut command = girandole();
        command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        command.args(run(&folder, &["--elastic", "2:3"])).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let ranks = Nodes((0..3).map(start).collect());
    let run = Run { nodes: ranks, folder }.at_work();
    run.signal(0, Signal::KILL);
    let (outputs, folder) = run.end();
    assert!(
        text(&outputs[1].stderr).contains("2 ranks of 3 go on at epoch "),
        "{}",
        text(&outputs[1].stderr)
    );
    assert!(text(&outputs[1].stdout).contains("Epoch 99, "));
    ended_well(&outputs[1], &folder);
    ended_well(&outputs[2], &folder);
}

/// Starts a rank of an elastic job that others may join, which ends when it has taken so many epochs.
fn by_hand(folder: &Folder, (rank, port): (usize, &str), newcomer: &str, more: &[&str]) -> Child {
    let mut command = girandole();
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "2");
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port);
    command.env("GIRANDOLE_ELASTIC_FILE", folder.path("group")).env("GIRANDOLE_NEWCOMER", newcomer);
    // A newcomer finds existing checkpoints.
    let checkpoints = folder.argument("checkpoints");
    let keep = ["--checkpoint-dir", &checkpoints, "--checkpoint-every", "20"];
    // So many epochs that it has come long before the others are done.
    let options = [&["--elastic", "2:3", "--epochs", "300"], &keep[..], more].concat();
    command.args(run(folder, &options)).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn one_that_is_started_by_hand_joins_those_that_were() {
    let (folder, port) = (Folder::new(), free_port().to_string());
    let ranks = Nodes((0..2).map(|rank| by_hand(&folder, (rank, &port), "0", &[])).collect());
    let mut run = Run { nodes: ranks, folder }.at_work();
    run.nodes.0.push(by_hand(&run.folder, (2, &port), "1", &[]));
    let (outputs, folder) = run.end();
    let remarks = text(&outputs[0].stderr);
    assert!(remarks.contains("rank 2 has come"), "{remarks}");
    outputs.iter().for_each(|output| ended_well(output, &folder));
}

#[test]
fn one_that_joins_with_other_options_leaves_and_the_others_go_on() {
    let (folder, port) = (Folder::new(), free_port().to_string());
    let ranks = Nodes((0..2).map(|rank| by_hand(&folder, (rank, &port), "0", &[])).collect());
    let run = Run { nodes: ranks, folder }.at_work();
    let newcomer = by_hand(&run.folder, (2, &port), "1", &["--mask", "none"]);
    let newcomer = newcomer.wait_with_output().unwrap();
    let host = format!(" (host {})", comm::internal::host_name());
    let said = text(&newcomer.stderr).replace(&host, "");
    let expected =
        "rank 2: error: rank 2 was given --mask none, and rank 0 --mask document: give all ranks the same";
    assert_eq!(said.lines().last(), Some(expected), "{said}");
    assert_eq!(newcomer.status.code(), Some(2));
    let (outputs, folder) = run.end();
    outputs.iter().for_each(|output| ended_well(output, &folder));
}
