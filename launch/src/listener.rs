//! Tests the listening socket that rank 0 inherits from the launcher.

#[cfg(test)]
mod tests {
    use crate::SpawnConfig;
    use crate::spawn;
    use crate::{report_result, worker_guard};
    use comm::launcher::is_worker;
    use comm::launcher::{MASTER_PORT, inherited_listener};
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::process::Command;

    const NAME: &str = "listener::tests::processes_of_the_test_below";
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
