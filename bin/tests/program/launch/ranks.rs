//! The environment of ranks of any program, and their failures.

use std::io::Read;
use std::net::TcpListener;
use std::process::{Command, Stdio};

use crate::common::{free_port, girandole, sorted, succeed, text};
use crate::launch::shell::shell;

#[test]
fn a_rank_is_told_what_torchrun_tells() {
    let script = "echo $RANK $LOCAL_RANK $ROLE_RANK of $WORLD_SIZE $LOCAL_WORLD_SIZE $ROLE_WORLD_SIZE, \
                  node $NODE_RANK $GROUP_RANK of $GROUP_WORLD_SIZE, at $MASTER_ADDR, $TORCHELASTIC_RESTART_COUNT \
                  $TORCHELASTIC_USE_AGENT_STORE ${#TORCHELASTIC_RUN_ID}";
    let expected = |rank| format!("{rank} {rank} {rank} of 3 3 3, node 0 0 of 1, at 127.0.0.1, 0 False 32");
    // Variables from an outer launcher are overridden.
    let mut command = shell(3, script);
    command.env("RANK", "7").env("WORLD_SIZE", "9").env("TORCHELASTIC_USE_AGENT_STORE", "True");
    assert_eq!(sorted(&succeed(&mut command)), [0, 1, 2].map(expected));
}

#[test]
fn all_ranks_share_one_secret_that_is_on_no_command_line() {
    let script =
        "tr '\\0' ' ' </proc/$PPID/cmdline | grep -c $GIRANDOLE_SECRET; echo $GIRANDOLE_SECRET $MASTER_PORT";
    let lines = sorted(&succeed(&mut shell(2, script)));
    assert_eq!(lines[..2], ["0", "0"]);
    assert_eq!(lines[2], lines[3]);
    assert!(lines[2].len() > 64 && lines[2].split(' ').count() == 2);
}

#[test]
fn threads_are_limited_where_nobody_has_and_there_are_several_ranks() {
    let script = "echo $OMP_NUM_THREADS-$PYTHONUNBUFFERED";
    assert_eq!(sorted(&succeed(&mut shell(2, script))), ["1-1", "1-1"]);
    assert_eq!(sorted(&succeed(&mut shell(1, script))), ["-1"]);
    let mut set = shell(2, script);
    set.env("OMP_NUM_THREADS", "3").env("PYTHONUNBUFFERED", "");
    assert_eq!(sorted(&succeed(&mut set)), ["3-", "3-"]);
}

#[test]
fn cores_are_shared_among_ranks() {
    let cores = std::thread::available_parallelism().unwrap().get();
    for ranks in [1, 2, 3] {
        let threads = (cores / ranks).max(1).to_string();
        let mut command = shell(ranks, "echo $RAYON_NUM_THREADS");
        assert_eq!(sorted(&succeed(command.env_remove("RAYON_NUM_THREADS"))), vec![threads; ranks]);
    }
    let mut set = shell(2, "echo $RAYON_NUM_THREADS");
    assert_eq!(sorted(&succeed(set.env("RAYON_NUM_THREADS", "5"))), ["5", "5"]);
}

#[test]
fn ranks_are_counted_as_torchrun_counts_them() {
    let count = |arguments: &[&str]| {
        let mut command = girandole();
        command.arg("launch").args(arguments).args(["--", "sh", "-c", "echo rank"]);
        sorted(&succeed(&mut command)).len()
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(count(&[]), 1);
    assert_eq!(count(&["--nproc_per_node=3"]), 3);
    assert_eq!(count(&["--nproc-per-node", "cpu"]), cores);
    assert!(count(&["--nproc-per-node", "auto"]) >= 1);
    // Also without `--`; the program keeps its own options.
    let mut command = girandole();
    command.args([
        "launch", "--nproc-per-node", "2", "sh", "-c", "echo \"$@\"", "x", "--nproc-per-node", "9", "--help",
    ]);
    assert_eq!(sorted(&succeed(&mut command)), ["--nproc-per-node 9 --help"; 2]);
}

#[test]
fn a_free_port_or_the_one_that_is_asked_for() {
    let free = free_port().to_string();
    let ask = [
        "launch", "--master-addr", "localhost", "--master-port", &free, "sh", "-c",
        "echo $MASTER_ADDR $MASTER_PORT",
    ];
    assert_eq!(text(&succeed(girandole().args(ask)).stdout), format!("localhost {free}\n"));
    let mut told = girandole();
    told.env("PET_MASTER_PORT", &free).args(["launch", "sh", "-c", "echo $MASTER_PORT"]);
    assert_eq!(text(&succeed(&mut told).stdout), format!("{free}\n"));
}

/// Returns the one-line error, before anything is started, and the exit code.
fn refused(command: &mut Command) -> (String, i32) {
    let output = command.output().unwrap();
    let line = text(&output.stderr);
    assert_eq!(text(&output.stdout), "");
    assert!(line.starts_with("error: "), "{line}");
    assert!(line.lines().count() == 1 || line.contains("try '--help'"), "{line}");
    (line, output.status.code().unwrap())
}

#[test]
fn what_cannot_be_started_is_one_line() {
    let launch = |arguments: &[&str]| refused(girandole().arg("launch").args(arguments));
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    std::fs::write(&plain, "").unwrap();
    let plain = plain.to_str().unwrap();
    for (arguments, part) in [
        (&["no-such-program"][..], "PROGRAM: got no-such-program; no such program"),
        (&["./no/such/program"], "PROGRAM: got ./no/such/program; no such program"),
        (
            &["--nproc-per-node", "2", "--rdzv-endpoint=x", "--", "true"],
            "error: launch: got --rdzv-endpoint=x; there is no such option; the launchers meet at --master-addr HOST",
        ),
        (&["--nproc-per-nod", "2", "true"], "error: launch: got --nproc-per-nod; there is no such option"),
        (&[plain], "it cannot be run: Permission denied"),
        (&["/"], "it cannot be run: Permission denied"),
        (&["--nproc-per-node", "0", "true"], "'--nproc-per-node <N|gpu|cpu|auto>'"),
        (&["--nproc-per-node", "-2", "true"], "1 or more"),
        (&["--nproc-per-node", "some", "true"], "or gpu, cpu or auto"),
        (
            &["--nproc-per-node", "999999999", "true"],
            "--nproc-per-node: got 999999999; this process may have",
        ),
        (&["--master-port", "0", "true"], "'0'"),
        (&["--master-port", "65536", "true"], "'65536'"),
        (&["--master-addr", "192.0.2.1", "true"], "--master-addr: got 192.0.2.1; this machine does not have"),
        (&["--master-addr", "no host", "true"], "--master-addr: got no host; the name has no address"),
        (&["--transport", "x", "true"], "'x'"),
        (&[], "<PROGRAM>"),
        (&[""], "PROGRAM: got "),
    ] {
        let (line, code) = launch(arguments);
        assert!(line.contains(part) && code == 2, "{arguments:?}: {code} {line}");
    }
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (line, code) = launch(&["--master-port", &port, "true"]);
    assert!(line.contains(&format!("cannot listen on 127.0.0.1:{port}")) && code == 1, "{line}");
}

#[test]
fn no_gpu_is_told() {
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", "gpu", "true"]).env("CUDA_VISIBLE_DEVICES", "");
    let (line, code) = refused(&mut command);
    assert!(
        line.contains("--nproc-per-node: got gpu; this machine shows no NVIDIA GPU") && code == 2,
        "{line}"
    );
}

#[test]
fn a_rank_whose_pipe_broke_is_told_as_long_as_somebody_reads() {
    for (end, said) in
        [("exit 141", "exited with code 141\n"), ("kill -PIPE $$", "was killed by signal SIGPIPE\n")]
    {
        let output =
            shell(2, &format!("[ $RANK = 0 ] && exec sleep 1000; echo why >&2; {end}")).output().unwrap();
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(141), "{remarks}");
        assert!(remarks.contains("error: rank 1 (pid ") && remarks.contains(said), "{remarks}");
    }
}

#[test]
fn what_ranks_say_of_their_end_is_not_shown_once_nobody_reads() {
    let mut command = shell(2, "trap 'echo noise >&2; exit 3' TERM; while :; do echo line; done");
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 5]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!((text(&output.stderr).as_str(), output.status.code()), ("", Some(141)));
}

#[test]
fn a_foreign_address_to_listen_on_is_told_with_its_variable() {
    let mut launched = girandole();
    launched.args(["launch", "--nproc-per-node", "2", "girandole", "ddp-linear"]);
    let mut bare = girandole();
    bare.arg("ddp-linear");
    for command in [&mut launched, &mut bare] {
        let output = command.env("GIRANDOLE_BIND", "192.0.2.1").output().unwrap();
        let remarks = text(&output.stderr);
        let part = "bind (GIRANDOLE_BIND): got 192.0.2.1; this host has no such address";
        assert!(remarks.lines().last().unwrap().contains(part), "{remarks}");
        assert_eq!(output.status.code(), Some(2), "{remarks}");
    }
}

#[test]
fn the_exit_code_is_that_of_the_rank_that_failed_first() {
    for (script, code, said) in [
        ("[ $RANK = 0 ] && exec sleep 1000; echo why >&2; exit 3", 3, " exited with code 3\n"),
        ("[ $RANK = 0 ] && exec sleep 1000; echo why >&2; exit 75", 1, " exited with code 75\n"),
        (
            "[ $RANK = 0 ] && exec sleep 1000; echo why >&2; kill -9 $$",
            137,
            " was killed by signal SIGKILL\n",
        ),
    ] {
        let output = shell(2, script).output().unwrap();
        let remarks = text(&output.stderr);
        let (before, last) = remarks.split_once("error: rank 1 (pid ").unwrap();
        let repeated = "why\nrank 1's last lines on stderr:\n    why\n";
        assert_eq!((output.status.code(), before), (Some(code), repeated), "{remarks}");
        // The cause is in the last line.
        assert_eq!(last.trim_start_matches(char::is_numeric), format!("){said}"), "{remarks}");
    }
}
