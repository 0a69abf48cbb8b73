//! The timeout also applies to name resolution when no name server answers: runs ranks in a network namespace where
//! that is so.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "all of it is test")]

use std::net::UdpSocket;
use std::process::Command;
use std::time::Duration;

use comm::{Tcp, TcpConfig};
use launch::{SpawnConfig, spawn};

const ROLE: &str = "NAMES_TEST_ROLE";
const HOST: [&str; 5] = ["--user", "--map-root-user", "--net", "--mount", "--kill-child"];
const SETUP: &str = "ip link set lo up && mount --bind \"$0\" /etc/resolv.conf && exec \"$@\"";
/// The system would wait longer than the rank does.
const SETTINGS: &str = "nameserver 127.0.0.1\noptions timeout:30 attempts:1\n";

fn rank(rank: usize) {
    let outcome = Tcp::connect(&TcpConfig {
        rank,
        world_size: 2,
        init_method: "tcp://nobody.example:29500".parse().unwrap(),
        timeout: Duration::from_secs(1),
        ..TcpConfig::default()
    });
    let message = outcome.unwrap_err().to_string();
    assert!(message.contains("the name nobody.example has no address (no name server answers)"), "{message}");
}

/// One node is enough to test it.
fn launcher() {
    let outcome = spawn(&SpawnConfig {
        program: Some("true".into()),
        master_addr: "nobody.example".into(),
        join_timeout: Duration::from_secs(1),
        ..SpawnConfig::default()
    });
    let message = outcome.unwrap_err().to_string();
    assert!(
        message.contains("nobody.example; the name has no address (no name server answers)"),
        "{message}"
    );
}

/// Not a test by itself: the entry point of the process of the test below.
#[test]
fn process() {
    if std::env::var_os(ROLE).is_some() {
        let _silent = UdpSocket::bind("127.0.0.1:53").unwrap();
        rank(0);
        rank(1);
        launcher();
    }
}

#[test]
fn the_time_out_holds_for_names() {
    let folder = tempfile::tempdir().unwrap();
    let settings = folder.path().join("resolv.conf");
    std::fs::write(&settings, SETTINGS).unwrap();
    let inside = |program: &[&std::ffi::OsStr]| {
        let mut command = Command::new("unshare");
        command.args(HOST).args(["sh", "-c", SETUP]).arg(&settings).args(program).env(ROLE, "rank");
        command.output()
    };
    if !inside(&["true".as_ref()]).is_ok_and(|output| output.status.success()) {
        println!("this system lets nobody make namespaces here: nothing is tested");
        return;
    }
    let this = std::env::current_exe().unwrap();
    let output = inside(&[this.as_os_str(), "process".as_ref(), "--exact".as_ref()]).unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
