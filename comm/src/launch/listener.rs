//! The listening socket that the launcher gave to rank 0.

use std::fs::File;
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;

use super::environment::{LISTENER, LISTENER_STDIN, MASTER_PORT};
use crate::platform::socket::is_listening;

/// The socket that listens on `MASTER_PORT`, where the launcher handed one over as standard input. It is taken once:
/// the standard input is empty afterwards, so that no child of this process holds the socket too.
pub(crate) fn inherited_listener() -> Option<TcpListener> {
    if std::env::var_os(LISTENER)? != LISTENER_STDIN {
        return None;
    }
    let port: u16 = std::env::var(MASTER_PORT).ok()?.parse().ok()?;
    let stdin = io::stdin();
    // A child of rank 0 finds the variable too, but another standard input.
    if !is_listening(stdin.as_fd()) {
        return None;
    }
    // The copy is closed when another program is executed.
    let listener = TcpListener::from(stdin.as_fd().try_clone_to_owned().ok()?);
    if listener.local_addr().ok()?.port() != port {
        return None;
    }
    // Failing that, the port stays taken for as long as the process lives: a pity, no more.
    if let Ok(nothing) = File::open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&nothing);
    }
    Some(listener)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::{SpawnConfig, is_worker, report_result, spawn, worker_guard};
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::process::Command;

    const NAME: &str = "launch::listener::tests::processes_of_the_test_below";
    const SWITCH: &str = "LAUNCH_TEST_LISTENER";

    #[test]
    fn processes_of_the_test_below() {
        if is_worker() {
            worker_guard().unwrap();
            rank();
        } else if std::env::var_os(SWITCH).is_some() {
            let results = spawn(&SpawnConfig { world_size: 2, ..SpawnConfig::default() }).unwrap();
            assert_eq!(results, [Some("hello".to_owned()), Some("sent".to_owned())]);
        }
    }

    fn rank() {
        let port: u16 = std::env::var(MASTER_PORT).unwrap().parse().unwrap();
        let mut text = String::new();
        if std::env::var("RANK").unwrap() == "0" {
            let listener = inherited_listener().unwrap();
            assert!(inherited_listener().is_none(), "standard input still holds the socket");
            listener.accept().unwrap().0.read_to_string(&mut text).unwrap();
        } else {
            assert!(inherited_listener().is_none());
            TcpStream::connect(("127.0.0.1", port)).unwrap().write_all(b"hello").unwrap();
            text.push_str("sent");
        }
        report_result(&text).unwrap();
    }

    #[test]
    fn rank_0_inherits_the_listener_and_rank_1_reaches_it() {
        let mut spawner = Command::new(std::env::current_exe().unwrap());
        spawner.args([NAME, "--exact", "--nocapture", "--quiet"]).env(SWITCH, "1");
        let output = spawner.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}
