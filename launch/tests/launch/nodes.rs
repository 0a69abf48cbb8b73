//! Launchers of two nodes, as threads of one process.

use std::process::exit;
use std::time::{Duration, Instant};

use comm::{Tcp, TcpConfig};
use launch::{EXIT_PEER_FAILED, ElasticJob, SpawnConfig, spawn};
use rustix::process::{Pid, test_kill_process};

use crate::job::Job;
use crate::port::free_port;

/// Where ranks find what others of them have written.
const FOLDER: &str = "LAUNCH_TEST_FOLDER";
/// After this long a test has failed; nothing takes nearly as long.
const LIMIT: Duration = Duration::from_secs(60);

/// The last rank of its node fails, and its launcher is told to stop when it has no ranks any more.
const ALONE: &str = "[ $RANK = 1 ] || exec sleep 1000; echo why >&2; exit 7";
/// All ranks of the second node are killed, one after the launcher was told to stop because of the other; only then the others tell
/// that they had met.
const TWO_LOST: &str = r#"
seen() { until grep -qx $1 "$GIRANDOLE_ELASTIC_ENDED" 2> /dev/null; do sleep 0.01; done; sleep 0.3; }
case $RANK in
    2) kill -9 $$ ;;
    3) seen 2; kill -9 $$ ;;
    *) seen 3; printf '\001girandole-met:\n' ;;
esac"#;

/// What each of the two launchers has to say of a job in which as many ranks are to be left, where it may lose some.
pub(crate) fn launch(role: &str) -> ! {
    let folder = tempfile::tempdir().unwrap();
    let (ranks, min, script) = match role {
        "two nodes: alone" => (2, Some(2), Some(ALONE)),
        "two nodes: two lost" => (4, Some(2), Some(TWO_LOST)),
        "two nodes: late" => (4, None, None),
        "two nodes: late, elastic" => (4, Some(2), None),
        other => panic!("no role {other}"),
    };
    let port = free_port();
    let config = |node_rank| SpawnConfig {
        world_size: ranks,
        nodes: 2,
        node_rank,
        master_port: port,
        elastic: min.map(|min| ElasticJob { min, ..ElasticJob::default() }),
        grace: if role == "two nodes: alone" { Duration::from_millis(50) } else { LIMIT },
        program: script.map(|_| "/bin/sh".into()),
        args: script.map(|script| vec!["-c".into(), script.into()]),
        env: vec![(FOLDER.into(), folder.path().into()), ("GIRANDOLE_TIMEOUT".into(), "10".into())],
        ..SpawnConfig::default()
    };
    std::thread::scope(|scope| {
        for node in 0..2 {
            scope.spawn(move || match spawn(&config(node)) {
                Ok(results) => eprintln!("NODE {node}: {results:?}"),
                Err(error) => eprintln!("NODE {node}: {error}"),
            });
        }
    });
    drop(folder);
    exit(0)
}

/// Rank 2 fails, and so there is no group. Those that come when the first one has ended for that learn of it as well.
pub(crate) fn late(rank: usize) {
    let file = std::path::Path::new(&std::env::var_os(FOLDER).unwrap()).join("first");
    match rank {
        0 => {
            let whole = file.with_extension("whole");
            std::fs::write(&whole, std::process::id().to_string()).unwrap();
            std::fs::rename(whole, file).unwrap();
        }
        2 => exit(3),
        _ => {
            let first = || Pid::from_raw(std::fs::read_to_string(&file).ok()?.parse().ok()?);
            wait(|| first().is_some());
            wait(|| first().is_none_or(|pid| test_kill_process(pid).is_err()));
        }
    }
    eprintln!("RANK {rank}: {}", Tcp::connect(&TcpConfig::from_env().unwrap()).unwrap_err());
    exit(EXIT_PEER_FAILED)
}

fn wait(until: impl Fn() -> bool) {
    let began = Instant::now();
    while !until() {
        assert!(began.elapsed() < LIMIT, "it is not so yet");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What launchers and ranks have said.
fn said(role: &str) -> String {
    let finished = Job::start(role, 0).finish();
    assert!(finished.status.success(), "{}", finished.stderr);
    finished.stderr
}

#[test]
fn the_last_lines_of_a_rank_that_was_alone_on_its_node_are_told_by_both() {
    let said = said("two nodes: alone");
    for node in 0..2 {
        let (_, told) =
            said.split_once(&format!("NODE {node}: rank 1 (pid ")).unwrap_or_else(|| panic!("{said}"));
        let (headline, rest) = told.split_once('\n').unwrap();
        assert!(headline.ends_with(") exited with code 7"), "{said}");
        assert!(rest.starts_with("  its last lines on stderr:\n    why\n"), "{said}");
    }
}

#[test]
fn all_ranks_of_a_node_may_be_lost_before_the_launchers_hear_that_they_have_met() {
    let said = said("two nodes: two lost");
    for node in 0..2 {
        assert!(said.contains(&format!("NODE {node}: [None, None]\n")), "{said}");
    }
}

#[test]
fn who_comes_late_to_the_meeting_learns_whom_all_miss_be_it_of_another_node() {
    for role in ["two nodes: late", "two nodes: late, elastic"] {
        let said = said(role);
        for rank in [0, 1, 3] {
            assert!(said.contains(&format!("RANK {rank}: rank 2 (host ")), "{role}: {said}");
        }
        for node in 0..2 {
            assert!(said.contains(&format!("NODE {node}: rank 2 (pid ")), "{role}: {said}");
        }
    }
}
