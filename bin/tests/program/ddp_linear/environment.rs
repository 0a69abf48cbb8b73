//! Ranks started by another launcher, by their environment.

use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Folder, free_port, girandole, losses_of, metrics, refuse_with, text, without_times};
use crate::ddp_linear::LINEAR;

fn rank(rank: &str, world_size: &str, port: u16) -> Command {
    let mut command = LINEAR.command();
    command.env("RANK", rank).env("WORLD_SIZE", world_size);
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command
}

fn start(command: &mut Command, arguments: &[&str]) -> Child {
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn good(child: Child) -> Output {
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}\n{}", output.status, text(&output.stderr));
    output
}

#[test]
fn an_environment_that_makes_no_sense() {
    for (variables, part) in [
        (&[("RANK", "5"), ("WORLD_SIZE", "2")][..], "RANK: got 5; with world size 2, give 0 to 1"),
        (&[("RANK", "-1"), ("WORLD_SIZE", "2")], "RANK: got -1"),
        (&[("RANK", "0"), ("WORLD_SIZE", "two")], "WORLD_SIZE: got two"),
        (&[("RANK", "0"), ("WORLD_SIZE", "0")], "WORLD_SIZE: got 0"),
        (&[("RANK", "0")], "RANK=0 is set, but WORLD_SIZE is not"),
        (&[("WORLD_SIZE", "2")], "WORLD_SIZE=2 is set, but RANK is not"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2")], "MASTER_ADDR: got nothing"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")], "MASTER_PORT: got nothing"),
    ] {
        let (line, code) = refuse_with(LINEAR.command().envs(variables.iter().copied()), &[]);
        assert!(line.contains(part) && code == 2, "{variables:?}: {line}");
    }
    for threads in ["0", "-1", "abc", "100000"] {
        let said = format!("error: RAYON_NUM_THREADS: got {threads}; give a number of threads from 1 to ");
        let mut launch = girandole();
        launch.args(["launch", "--nproc-per-node", "1", "--", "true"]);
        for command in [LINEAR.command(), launch] {
            let (line, code) = refuse_with({ command }.env("RAYON_NUM_THREADS", threads), &[]);
            assert!(line.starts_with(&said) && code == 2, "{line}");
        }
    }
    for port in ["0", "65536", "web", "-1"] {
        let (line, _) = refuse_with(rank("0", "2", 1).env("MASTER_PORT", port), &[]);
        assert!(line.contains(&format!("MASTER_PORT: got {port}")), "{line}");
    }
    let (line, _) = refuse_with(&mut rank("0", "2", 1), &["--world-size", "3"]);
    assert!(line.contains("--world-size: got 3; the environment says WORLD_SIZE=2"), "{line}");
}

/// What `srun -n4 --pty bash` leaves in the shell.
#[test]
fn in_an_interactive_shell_of_slurm_it_waits_for_nobody() {
    let variables =
        [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_PTY_PORT", "33"), ("SLURM_JOB_NAME", "bash")];
    for options in [&[][..], &["--world-size", "2"]] {
        let (line, code) = refuse_with(LINEAR.command().envs(variables), options);
        let said = "SLURM_PTY_PORT=33 and SLURM_JOB_NAME=bash says that it is an interactive shell";
        assert!(line.contains(said) && line.contains("env -u SLURM_PROCID") && code == 2, "{line}");
    }
    let mut command = LINEAR.command();
    command.envs(variables).env_remove("SLURM_PROCID");
    good(start(&mut command, &["--epochs", "1", "--samples", "32"]));
}

#[test]
fn a_host_that_nobody_knows_is_looked_for_no_longer_than_the_option_says() {
    let slurm = [("SLURM_PROCID", "1"), ("SLURM_NTASKS", "2"), ("SLURM_STEP_NODELIST", "localhost")];
    let mpi =
        [("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")];
    for scheduler in [slurm, mpi] {
        let mut command = LINEAR.command();
        command.envs(scheduler).env("MASTER_ADDR", "nowhere.invalid").env("MASTER_PORT", "29500");
        let mut rank = start(command.env("GIRANDOLE_TIMEOUT", "86400"), &["--timeout", "0.5"]);
        let begun = Instant::now();
        while rank.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(60) {
            std::thread::sleep(Duration::from_millis(20));
        }
        // It has already ended.
        let _ = rank.kill();
        let output = rank.wait_with_output().unwrap();
        let line = text(&output.stderr);
        let told = "error: the host of rank 0: got nowhere.invalid; the name has no address (";
        assert!(line.starts_with(told) && output.status.code() == Some(2), "{scheduler:?}: {line}");
    }
}

#[test]
fn what_ranks_would_refuse_is_told_before_any_training() {
    for (variable, value, part) in [
        ("GIRANDOLE_TRANSPORT", "foo", "GIRANDOLE_TRANSPORT: got foo; give auto, tcp or shm"),
        ("GIRANDOLE_TLS", "foo", "GIRANDOLE_TLS: got foo; give off, hosts or all"),
        ("GIRANDOLE_BIND", "foo", "GIRANDOLE_BIND: got foo; give an IP address"),
        ("GIRANDOLE_TIMEOUT", "foo", "GIRANDOLE_TIMEOUT: got foo; give "),
        ("GIRANDOLE_INIT_METHOD", "foo", "GIRANDOLE_INIT_METHOD: got foo; give env://"),
        ("GIRANDOLE_INIT_METHOD", "tcp://no.such.host.invalid:444", "got no.such.host.invalid; "),
        ("GIRANDOLE_INIT_METHOD", "file:///no/such/folder", "the meeting's file: got /no/such/folder; "),
    ] {
        let (line, code) = refuse_with(LINEAR.command().env(variable, value), &[]);
        assert!(line.contains(part) && code == 2, "{variable}={value}: {line}");
    }
    let (line, code) = refuse_with(&mut LINEAR.command(), &["--init-method", "file:///no/such/folder"]);
    assert!(line.contains("the meeting's file: got /no/such/folder") && code == 2, "{line}");
    // The other ranks need a single address of this rank.
    let folder = Folder::new();
    let meeting = format!("file://{}", folder.argument("meeting"));
    let mut command = LINEAR.command();
    let (line, code) = refuse_with(command.env("GIRANDOLE_BIND", "0.0.0.0"), &["--init-method", &meeting]);
    assert!(line.contains("bind (GIRANDOLE_BIND): got 0.0.0.0; give the one address") && code == 2, "{line}");
    // Addresses that this machine does not have: 192.0.2.0/24 is reserved for documentation.
    let mut command = LINEAR.command();
    let (line, code) = refuse_with(command.env("GIRANDOLE_BIND", "192.0.2.1"), &[]);
    let refused = "bind (GIRANDOLE_BIND): got 192.0.2.1; this host has no such address";
    assert!(line.contains(refused) && code == 2, "{line}");
    let (line, code) = refuse_with(&mut LINEAR.command(), &["--init-method", "tcp://192.0.2.1:444"]);
    assert!(
        line.contains("this host has no such address; give an address of the host of rank 0") && code == 2,
        "{line}"
    );
}

#[test]
fn options_of_a_rank_are_checked_before_it_joins() {
    let (line, _) = refuse_with(&mut rank("0", "2", 1), &["--save", "/missing/file"]);
    assert!(line.contains("cannot write /missing/file"), "{line}");
    let (line, _) = refuse_with(&mut rank("1", "2", 1), &["--keep-total-batch", "--batch-size", "1"]);
    assert!(line.contains("--batch-size"), "{line}");
}

#[test]
fn a_port_in_use_is_an_error_before_any_training() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut command = rank("0", "2", taken.local_addr().unwrap().port());
    let output = command.args(["--timeout", "5"]).output().unwrap();
    let line = text(&output.stderr);
    assert_eq!((output.status.code(), text(&output.stdout).as_str(), line.lines().count()), (Some(1), "", 1));
    assert!(line.starts_with("rank 0: error: cannot listen on 127.0.0.1:"), "{line}");
}

#[test]
fn nobody_else_comes() {
    for number in ["0", "1"] {
        let output = rank(number, "2", free_port()).args(["--timeout", "0.5"]).output().unwrap();
        let line = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(1), ""));
        let begin = format!("error: rank {number}: the group of 2 did not meet at ");
        assert!(line.lines().last().unwrap().starts_with(&begin), "{line}");
    }
}

#[test]
fn two_of_them_print_together_what_the_bare_command_prints() {
    let folder = Folder::new();
    let arguments = ["--epochs", "2", "--samples", "6400"];
    let files =
        |name: &str| [folder.argument(&format!("{name}.jsonl")), folder.argument(&format!("{name}.st"))];
    let [bare_metrics, bare_weights] = files("bare");
    let bare =
        LINEAR.succeed(&[&arguments[..], &["--metrics", &bare_metrics, "--save", &bare_weights]].concat());

    let port = free_port();
    let [own_metrics, own_weights] = files("own");
    let own = [&arguments[..], &["--metrics", &own_metrics, "--save", &own_weights]].concat();
    let second = start(&mut rank("1", "2", port), &own);
    let first = start(&mut rank("0", "2", port), &own);
    let (first, second) = (good(first), good(second));
    assert_eq!(without_times(&first), without_times(&bare));
    assert_eq!(text(&second.stdout), "");
    assert_eq!(std::fs::read(own_weights).unwrap(), std::fs::read(bare_weights).unwrap());
    let (own, bare) = (metrics(&folder.path("own.jsonl")), metrics(&folder.path("bare.jsonl")));
    for run in ["single", "ddp"] {
        assert_eq!(losses_of(&own, Some(run)), losses_of(&bare, Some(run)));
    }
}

#[test]
fn one_of_them_is_enough_where_there_is_one() {
    let short = ["--epochs", "1", "--samples", "3200"];
    let output = good(start(&mut rank("0", "1", 1), &short));
    assert_eq!(
        without_times(&output),
        without_times(&LINEAR.succeed(&[&short[..], &["--world-size", "1"]].concat()))
    );
}

#[test]
fn the_second_of_two_equal_ranks_is_refused_and_the_job_goes_on() {
    let port = free_port();
    let arguments = ["--epochs", "1", "--samples", "64"];
    let first = start(&mut rank("0", "3", port), &arguments);
    let mut twins = [(); 2].map(|()| start(&mut rank("1", "3", port), &arguments));
    // The group is not complete, so only the rejected rank ends.
    let refused = loop {
        if let Some(at) = twins.iter_mut().position(|twin| twin.try_wait().unwrap().is_some()) {
            break at;
        }
        std::thread::yield_now();
    };
    let [one, other] = twins;
    let (refused, accepted) = if refused == 0 { (one, other) } else { (other, one) };
    let last = start(&mut rank("2", "3", port), &arguments);
    let refused = refused.wait_with_output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let line = text(&refused.stderr);
    assert!(line.lines().last().unwrap().starts_with("error: rank 1 was refused at "), "{line}");
    for child in [first, accepted, last] {
        good(child);
    }
}

#[test]
fn a_rank_of_another_world_size_is_refused_and_the_job_goes_on() {
    let port = free_port();
    let arguments = ["--epochs", "1", "--samples", "64"];
    let first = start(&mut rank("0", "2", port), &arguments);
    let stranger = start(&mut rank("1", "3", port), &arguments).wait_with_output().unwrap();
    assert_eq!((stranger.status.code(), text(&stranger.stdout).as_str()), (Some(1), ""));
    let line = text(&stranger.stderr);
    assert!(line.contains("world size 3") && line.contains("has 2"), "{line}");
    let second = start(&mut rank("1", "2", port), &arguments);
    good(first);
    good(second);
}
