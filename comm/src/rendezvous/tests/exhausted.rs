//! A rank whose process cannot open more files.
#![allow(clippy::print_stdout)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

const LIMIT: &str = "GIRANDOLE_TEST_FILES";
/// More files than a test has open by itself.
const OPEN: u64 = 64;

/// Runs a rank in a process that may open `files` more files; returns what it reports in the end.
fn rank_1(port: u16, files: u64) -> String {
    let name = "rendezvous::tests::exhausted::a_rank_without_file_descriptors_gives_up_and_is_named";
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(LIMIT, files.to_string())
        .env("GIRANDOLE_SECRET", secret().unwrap().to_hex())
        .env("GIRANDOLE_TRANSPORT", "tcp")
        .env("GIRANDOLE_TIMEOUT", LONG.as_secs().to_string())
        .envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", port.to_string())
        .stderr(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| Some(line.split_once('@')?.1.to_string())).unwrap_or(text)
}

/// What that process runs.
fn meet_with_files(files: u64) {
    let config = TcpConfig::from_env().unwrap();
    let null = || File::open("/dev/null").unwrap();
    let is_below = |file: &File| (file.as_raw_fd() as u64) < OPEN;
    let _open: Vec<File> = std::iter::repeat_with(null).take_while(is_below).collect();
    let limit = Rlimit { current: Some(OPEN + files), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    match meet(&config) {
        Ok(_) => println!("@met"),
        Err(error) => println!("@{error}"),
    }
}

#[test]
fn a_rank_without_file_descriptors_gives_up_and_is_named() {
    if let Some(files) = std::env::var_os(LIMIT) {
        return meet_with_files(files.to_str().unwrap().parse().unwrap());
    }
    for files in 0.. {
        let (listener, port) = point();
        // Without a single file it cannot tell anybody.
        let leader = (files > 0).then(|| leading(tcp(0, 2, port), listener));
        let said = rank_1(port, files);
        if said == "met" {
            assert!(files > 3);
            return drop(leader.unwrap().join().unwrap().unwrap());
        }
        assert!(said.contains("raise the limit of open files (ulimit -n)"), "{files}: {said}");
        assert!(files > 0 || said.starts_with("looking for rank 0 at 127.0.0.1:"), "{said}");
        if let Some(leader) = leader {
            let message = leader.join().unwrap().unwrap_err().to_string();
            let told = ["rank 1 (host ", " gave up: ", "raise the limit of open files (ulimit -n)"];
            assert!(told.iter().all(|part| message.contains(part)), "{files}: {message}");
        }
    }
}
