//! Messages and exit codes at the end of a job.

use std::io::Read;
use std::process::Child;

use rustix::process::{Pid, Signal, kill_process};

use crate::port::free_port;
use crate::process::{end, program, read_until, text};

pub(crate) fn errors() {
    let [output] = end([program("fail")]);
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{remarks}");
    assert!(remarks.contains("rank 1: error: epoch 3: the data are gone\n"), "{remarks}");
    let (_, last) = remarks.split_once("\nerror: rank 1 (pid ").unwrap();
    assert!(last.contains(") exited with code 1\n"), "{remarks}");
    assert!(!remarks.contains("Problem"), "{remarks}");

    // Without a launcher each rank chooses its exit code itself.
    let port = free_port().to_string();
    let outputs = end([0, 1, 2].map(|rank: usize| {
        let mut command = program("fail");
        command.envs([("RANK", rank.to_string().as_str()), ("WORLD_SIZE", "3")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command
    }));
    let codes = outputs.each_ref().map(|output| output.status.code().unwrap());
    assert_eq!(codes, [75, 1, 75]);
    for (rank, output) in outputs.iter().enumerate().filter(|(rank, _)| *rank != 1) {
        let remarks = text(&output.stderr);
        assert!(remarks.starts_with(&format!("rank {rank}: error: epoch 3: rank 1 (host ")), "{remarks}");
    }
}

pub(crate) fn what_cannot_be_used() {
    let mut half = program("mean");
    half.env("RANK", "0");
    let mut bind = program("mean");
    bind.env("GIRANDOLE_BIND", "192.0.2.1");
    let mut orphan = program("mean");
    // No system has that many processes.
    orphan.env("GIRANDOLE_SPAWNER_PID", "2147483647");
    let [none, half, bind, orphan] = end([program("no ranks"), half, bind, orphan]);
    let line = "error: GIRANDOLE_SPAWNER_PID: got 2147483647; that launcher is gone, so this rank ends; unset the \
                variable to run without one\n";
    assert_eq!((text(&orphan.stderr).as_str(), orphan.status.code()), (line, Some(75)));
    for (output, line) in [
        (none, "error: world_size: got 0; at least 1 rank is needed\n"),
        (half, "error: WORLD_SIZE: got nothing; set it to the number of ranks, from 1 (a launcher does)\n"),
        (
            bind,
            "error: bind (GIRANDOLE_BIND): got 192.0.2.1; this host has no such address; give one that it has in the \
             network that connects the ranks\n",
        ),
    ] {
        assert_eq!((text(&output.stderr).as_str(), output.status.code()), (line, Some(2)));
    }
}

pub(crate) fn signals() {
    let mut child: Child = program("wait").spawn().unwrap();
    read_until(child.stdout.as_mut().unwrap(), "is here", 2);
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stderr), "error: stopped by SIGTERM; all ranks have ended\n");
    assert_eq!(output.status.code(), Some(128 + 15));
}

pub(crate) fn nobody_reads() {
    let mut child: Child = program("talk").spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 100]).unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((text(&output.stderr).as_str(), output.status.code()), ("", Some(141)));
}
