//! Launchers of two nodes, as threads of one process.

use std::path::PathBuf;
use std::process::exit;
use std::time::{Duration, Instant};

use comm::{Tcp, TcpConfig};
use launch::{EXIT_PEER_FAILED, ElasticJob, SpawnConfig, spawn};
use rustix::process::{Pid, test_kill_process};

use crate::job::Job;
use crate::port::free_port;

/// Variable with the folder in which ranks leave files for each other.
const FOLDER: &str = "LAUNCH_TEST_FOLDER";
/// A test that takes longer than this has failed; nothing takes nearly as long.
const LIMIT: Duration = Duration::from_secs(60);

/// Rank 2 fails, and then rank 0, which had been waiting for it in the rendezvous.
const MISSED: &str = "two nodes: late, missed";
/// Rank 0 fails, and its end is observed after that of a rank that blames it.
const FIRST: &str = "two nodes: late, first";
/// The end of rank 2 is observed after all ranks of the first node have ended, which blame it.
const AFTER_ALL: &str = "two nodes: late, after all";
/// The last rank of its node fails, and its launcher is told to stop when it has no ranks left.
const ALONE: &str = "[ $RANK = 1 ] || exec sleep 1000; echo why >&2; exit 7";
/// All ranks of the second node are killed, the second one after the launcher was told to stop because of the first;
/// only then the others report that they had formed a group.
const TWO_LOST: &str = r#"
seen() { until grep -qx $1 "$GIRANDOLE_ELASTIC_ENDED" 2> /dev/null; do sleep 0.01; done; sleep 0.3; }
case $RANK in
    2) kill -9 $$ ;;
    3) seen 2; kill -9 $$ ;;
    *) seen 3; printf '\001girandole-met:\n' ;;
esac"#;

/// Runs the two launchers of a job and prints the result of each. In an elastic job, half of the ranks must remain.
pub(crate) fn launch(role: &str) -> ! {
    let folder = tempfile::tempdir().unwrap();
    let (ranks, min, script) = match role {
        "two nodes: alone" => (2, Some(2), Some(ALONE)),
        "two nodes: two lost" => (4, Some(2), Some(TWO_LOST)),
        role => (4, role.ends_with(", elastic").then_some(2), None),
    };
    let port = free_port();
    let config = |node_rank| SpawnConfig {
        world_size: ranks,
        nodes: 2,
        node_rank,
        master_port: port,
        elastic: min.map(|min| ElasticJob { min, ..ElasticJob::default() }),
        failure_grace: if role == "two nodes: alone" { Duration::from_millis(50) } else { LIMIT },
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

/// One rank fails before a group is formed. At that time rank 0 is in the rendezvous, or others have ended with the
/// exit code that blames another rank. Ranks that join only after rank 0 has ended must learn of the failure as well.
pub(crate) fn late(role: &str, rank: usize) {
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let file = |rank: usize| folder.join(rank.to_string());
    let whole = file(rank).with_extension("whole");
    std::fs::write(&whole, std::process::id().to_string()).unwrap();
    std::fs::rename(whole, file(rank)).unwrap();
    let process = |rank| Pid::from_raw(std::fs::read_to_string(file(rank)).ok()?.parse().ok()?);
    // Waits until a rank has started and its launcher has observed its end.
    let end_of = |rank| {
        wait(|| process(rank).is_some());
        wait(|| process(rank).is_none_or(|pid| test_kill_process(pid).is_err()));
    };
    let fail = || {
        // By now its launcher has told the other one about the earlier ends.
        std::thread::sleep(Duration::from_millis(300));
        exit(3)
    };
    match (role.trim_end_matches(", elastic"), rank) {
        (MISSED, 2) => exit(3),
        (MISSED, 0) => {}
        (FIRST, 1) => exit(EXIT_PEER_FAILED),
        (FIRST, 0) => {
            end_of(1);
            fail()
        }
        (AFTER_ALL, 0 | 1) => exit(EXIT_PEER_FAILED),
        (AFTER_ALL, 2) => {
            end_of(0);
            end_of(1);
            fail()
        }
        (AFTER_ALL, _) => end_of(2),
        _ => end_of(0),
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

/// Runs a job, and returns the output of launchers and ranks.
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

fn all_learn_of(missed: usize, role: &str, late: &[usize]) {
    for role in [role.to_string(), format!("{role}, elastic")] {
        let said = said(&role);
        for rank in late {
            assert!(said.contains(&format!("RANK {rank}: rank {missed} (host ")), "{role}: {said}");
        }
        for node in 0..2 {
            assert!(said.contains(&format!("NODE {node}: rank {missed} (pid ")), "{role}: {said}");
        }
    }
}

#[test]
fn who_comes_late_to_the_meeting_learns_whom_all_miss_be_it_of_another_node() {
    all_learn_of(2, MISSED, &[0, 1, 3]);
}

#[test]
fn be_it_the_first_rank_that_was_seen_to_end_after_those_that_blame_it() {
    all_learn_of(0, FIRST, &[2, 3]);
}

#[test]
fn be_it_when_all_ranks_of_the_first_node_have_ended() {
    all_learn_of(2, AFTER_ALL, &[3]);
}
