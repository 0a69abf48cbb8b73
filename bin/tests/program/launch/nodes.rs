//! Two launchers on loopback, acting as two nodes of one job.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::common::{Folder, free_port, girandole, refuse_with, sorted, succeed, text};
use crate::launch::shell::ranks_of;

/// Longer than anything that is waited for, even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// The launchers of two nodes.
pub(crate) struct Nodes(pub(crate) Vec<Child>);

impl Nodes {
    pub(crate) fn start(options: &[&str], program: &[&str]) -> Self {
        Self::start_with(options, program, |_, _| {})
    }

    pub(crate) fn start_with(
        options: &[&str],
        program: &[&str],
        change: impl Fn(usize, &mut Command),
    ) -> Self {
        let port = free_port().to_string();
        let start = |node: usize| {
            let mut command = girandole();
            command.args([
                "launch",
                "--nproc-per-node",
                "2",
                "--nnodes",
                "2",
                "--node-rank",
                &node.to_string(),
            ]);
            command.args(["--master-port", &port]).args(options);
            change(node, &mut command);
            command.arg("--").args(program);
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        // Node 1 is started first, as that must work, too.
        let mut nodes: Vec<Child> = [1, 0].map(start).into();
        nodes.reverse();
        Self(nodes)
    }

    /// Waits for both launchers; returns their outputs.
    pub(crate) fn end(mut self) -> Vec<Output> {
        // Read concurrently: a launcher whose pipe is full would block the others.
        let wait = |node: Child| std::thread::spawn(|| node.wait_with_output().unwrap());
        let outputs: Vec<_> = std::mem::take(&mut self.0).into_iter().map(wait).collect();
        outputs.into_iter().map(|output| output.join().unwrap()).collect()
    }

    /// Waits until both launchers have started their ranks; returns these.
    pub(crate) fn ranks(&self) -> Vec<Vec<Pid>> {
        let began = Instant::now();
        loop {
            let ranks: Vec<_> = self.0.iter().map(ranks_of).collect();
            if ranks.iter().all(|ranks| ranks.len() == 2) {
                return ranks;
            }
            assert!(began.elapsed() < LIMIT, "{ranks:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in &mut self.0 {
            let _ = node.kill();
            let _ = node.wait();
        }
    }
}

pub(crate) fn last_line(output: &Output) -> String {
    text(&output.stderr).lines().last().unwrap_or_default().to_string()
}

#[test]
fn ranks_are_counted_over_both_and_meet() {
    let script =
        "echo $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_WORLD_SIZE $GIRANDOLE_BIND";
    let [first, second] = Nodes::start(&[], &["sh", "-c", script]).end().try_into().unwrap();
    assert_eq!(sorted(&first), ["0 0 0 4 2 2 127.0.0.1", "1 1 0 4 2 2 127.0.0.1"]);
    assert_eq!(sorted(&second), ["2 0 1 4 2 2 127.0.0.1", "3 1 1 4 2 2 127.0.0.1"]);

    let train = ["ddp-transformer", "--epochs", "2"];
    let [first, second] = Nodes::start(&[], &[&["girandole"], &train[..]].concat()).end().try_into().unwrap();
    let bare = succeed(girandole().args(train).args(["--world-size", "4"]));
    assert_eq!(text(&first.stdout), text(&bare.stdout), "{}", text(&first.stderr));
    assert_eq!((text(&second.stdout).as_str(), second.status.code()), ("", Some(0)));
}

#[test]
fn a_failure_on_one_is_a_restart_of_both_and_both_tell_the_first_cause() {
    let script = "[ $RANK = 3 ] || exec sleep 1000; echo no $TORCHELASTIC_RESTART_COUNT >&2; exit 7";
    for output in Nodes::start(&["--max-restarts", "1"], &["sh", "-c", script]).end() {
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{remarks}");
        assert_eq!(remarks.matches("all ranks start again (restart 1 of 1)").count(), 1, "{remarks}");
        let (_, last) = remarks.split_once("error: rank 3 (pid ").unwrap();
        assert!(last.contains(", node 1, host ") && last.contains(") exited with code 7\n"), "{remarks}");
        assert_eq!(text(&output.stderr).lines().rev().nth(1), Some("    no 1"));
    }
}

#[test]
fn a_folder_for_logs_may_be_called_anything() {
    let folder = Folder::new();
    let dir = folder.path("").join(OsStr::from_bytes(b"l\xff"));
    let give = |_, command: &mut Command| {
        command.arg("--log-dir").arg(&dir);
    };
    let script = "[ $RANK = 1 ] || exec sleep 1000; echo no >&2; exit 7";
    for output in Nodes::start_with(&[], &["sh", "-c", script], give).end() {
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(7), "{remarks}");
        let log = remarks.lines().rev().nth(1).unwrap();
        assert!(log.contains("/l\u{fffd}/") && log.ends_with("/1/stderr.log"), "{remarks}");
    }
}

#[test]
fn a_run_over_both_goes_on_from_its_checkpoint() {
    let folder = Folder::new();
    let [saved, whole, dir] = ["saved", "whole", "checkpoints"].map(|name| folder.argument(name));
    let train = ["ddp-transformer", "--samples", "20", "--epochs", "150", "--save"];
    let keep = [saved.as_str(), "--checkpoint-dir", &dir, "--checkpoint-every", "7"];
    let nodes = Nodes::start(&["--max-restarts", "3"], &[&["girandole"], &train[..], &keep[..]].concat());
    let ranks = nodes.ranks();
    let began = Instant::now();
    while !folder.path("checkpoints/latest").exists() {
        assert!(began.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(ranks[1][0], Signal::KILL).unwrap();
    for output in nodes.end() {
        let remarks = text(&output.stderr);
        assert!(output.status.success(), "{remarks}");
        assert!(
            remarks.contains("rank 2 (pid ") && remarks.contains("SIGKILL; all ranks start again"),
            "{remarks}"
        );
    }
    succeed(girandole().args(train).args([&whole, "--world-size", "4"]));
    assert!(std::fs::read(saved).unwrap() == std::fs::read(whole).unwrap());
}

#[test]
fn where_one_launcher_is_killed_the_other_names_its_node_and_leaves_nothing() {
    for killed in [0, 1] {
        let mut nodes = Nodes::start(&["--max-restarts", "3"], &["sh", "-c", "sleep 1000 & wait"]);
        let ranks = nodes.ranks();
        nodes.0[killed].kill().unwrap();
        let other = 1 - killed;
        let status = nodes.0[other].wait().unwrap();
        let began = Instant::now();
        let runs = |pid: &Pid| {
            let stat =
                std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
        };
        while let Some(left) = ranks.iter().flatten().find(|pid| runs(pid)) {
            assert!(began.elapsed() < LIMIT, "{left:?} still runs");
            std::thread::sleep(Duration::from_millis(1));
        }
        let output = nodes.end().swap_remove(other);
        assert_eq!(status.code(), Some(1));
        let expected = format!("error: node {killed} (host ");
        assert!(last_line(&output).starts_with(&expected), "{}", text(&output.stderr));
        assert!(last_line(&output).contains("is gone"), "{}", text(&output.stderr));
    }
}

#[test]
fn a_signal_to_one_is_the_end_of_both() {
    let nodes = Nodes::start(&["--max-restarts", "3"], &["sh", "-c", "exec sleep 1000"]);
    nodes.ranks();
    kill_process(Pid::from_child(&nodes.0[1]), Signal::TERM).unwrap();
    let [first, second] = nodes.end().try_into().unwrap();
    assert_eq!((first.status.code(), second.status.code()), (Some(1), Some(128 + 15)));
    assert!(last_line(&first).starts_with("error: node 1 (host "), "{}", text(&first.stderr));
    assert!(last_line(&first).ends_with(" ended the job: stopped by SIGTERM"), "{}", text(&first.stderr));
}

#[test]
fn launchers_that_do_not_fit_say_so() {
    let port = free_port().to_string();
    let start = |node: &str, ranks: &str| {
        let mut command = girandole();
        command.args(["launch", "--nnodes", "2", "--node-rank", node, "--nproc-per-node", ranks]);
        command.args(["--master-port", &port, "true"]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let nodes = Nodes(vec![start("0", "2"), start("1", "3")]);
    for output in nodes.end() {
        let line = last_line(&output);
        assert!(line.contains("--nproc-per-node: got 3, node 0 (host "), "{line}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn launchers_that_are_to_restart_unlike_each_other_say_so() {
    let restarts = |node: usize, command: &mut Command| {
        command.args(["--max-restarts", ["0", "3"][node]]);
    };
    for output in Nodes::start_with(&[], &["true"], restarts).end() {
        let line = last_line(&output);
        assert!(line.contains("--max-restarts: got 3, node 0 (host "), "{line}");
        assert_eq!(output.status.code(), Some(1));
    }
}

#[test]
fn strangers_are_kept_out_by_the_secret() {
    let folder = Folder::new();
    let secrets = ["ab", "cd"].map(|byte| {
        let path = folder.path(byte);
        std::fs::write(&path, byte.repeat(32)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        path
    });
    let run = |secrets: [&std::path::Path; 2]| {
        let give = |node: usize, command: &mut Command| {
            command.env("GIRANDOLE_SECRET_FILE", secrets[node]);
        };
        Nodes::start_with(&["--timeout", "2"], &["sh", "-c", "echo $GIRANDOLE_SECRET"], give).end()
    };
    for output in run([&secrets[0], &secrets[0]]) {
        assert_eq!(sorted(&output), ["ab".repeat(32), "ab".repeat(32)], "{}", text(&output.stderr));
    }
    let [first, second] = run([&secrets[0], &secrets[1]]).try_into().unwrap();
    let (first, second) = (last_line(&first), last_line(&second));
    assert!(
        first.starts_with("error: node 0: the launchers of 2 nodes did not meet at 127.0.0.1:"),
        "{first}"
    );
    assert!(
        second.starts_with("error: node 1: the launchers of 2 nodes did not meet at 127.0.0.1:"),
        "{second}"
    );
    assert!(second.contains("secret"), "{second}");
}

#[test]
fn options_that_make_no_sense_are_one_line() {
    for (arguments, part) in [
        (&["--nnodes", "2", "true"][..], "error: --node-rank: got nothing; with 2 nodes, give 0 to 1"),
        (
            &["--nnodes", "2", "--node-rank", "2", "true"],
            "error: --node-rank: got 2; with 2 nodes, give 0 to 1",
        ),
        (&["--node-rank", "1", "true"], "error: --node-rank: got 1; with 1 node, give 0 to 0"),
        (&["--nnodes", "0", "true"], "1 or more"),
        (&["--nnodes", "1:4", "true"], "give one number; --elastic lets a job go on"),
        (
            &["--nnodes", "2", "--node-rank", "0", "--timeout", "0.1", "--master-addr", "no host", "true"],
            "error: --master-addr: got no host; the name has no address",
        ),
    ] {
        let (line, _) = refuse_with(girandole().arg("launch"), arguments);
        assert!(line.contains(part), "{line}");
    }
    for (name, value, part) in [
        ("PET_NNODES", "two", "error: PET_NNODES: got two; give a whole number, 1 or more"),
        ("PET_NODE_RANK", "1", "error: PET_NODE_RANK: got 1; with 1 node, give 0 to 0"),
        ("PET_NPROC_PER_NODE", "x", "error: PET_NPROC_PER_NODE: got x; give a whole number"),
        ("PET_MASTER_PORT", "x", "error: PET_MASTER_PORT: got x; give 1 to 65535"),
        ("PET_MAX_RESTARTS", "-1", "error: PET_MAX_RESTARTS: got -1; give a whole number, 0 or more"),
    ] {
        let mut command = girandole();
        let (line, code) = refuse_with(command.env(name, value).arg("launch"), &["true"]);
        assert!(line.contains(part) && code == 2, "{line}");
    }
}

#[test]
fn what_kubeflow_sets_stands_in_for_options() {
    let script = "echo $RANK $GROUP_RANK $WORLD_SIZE";
    let port = free_port().to_string();
    let start = |node: &str| {
        let mut command = girandole();
        command.env("PET_NNODES", "2").env("PET_NODE_RANK", node).env("PET_NPROC_PER_NODE", "2");
        command.env("PET_MASTER_ADDR", "localhost").env("PET_MASTER_PORT", &port);
        // Set by the operator, counting pods instead of ranks.
        command.env("RANK", node).env("WORLD_SIZE", "2");
        command.args(["launch", "--", "sh", "-c", script]).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let [first, second] = Nodes(vec![start("0"), start("1")]).end().try_into().unwrap();
    assert_eq!(sorted(&first), ["0 0 4", "1 0 4"], "{}", text(&first.stderr));
    assert_eq!(sorted(&second), ["2 1 4", "3 1 4"]);
}
