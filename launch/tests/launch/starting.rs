//! What ranks receive and return, and what cannot be started.

use launch::{Error, SpawnConfig, spawn};

use crate::job::Job;

#[test]
fn the_last_report_of_each_rank_is_returned_and_does_not_show() {
    let finished = Job::start("report", 3).finish();
    assert_eq!(finished.outcome(), r#"[Some("{\"rank\":0}"), None, Some("{\"rank\":2}")]"#);
    assert!(finished.status.success());
    let count = |line: &str| finished.stdout.iter().filter(|other| *other == line).count();
    assert_eq!((count("a line"), count("half of a line")), (3, 3), "{:?}", finished.stdout);
    assert!(!finished.stdout.iter().any(|line| line.contains("girandole-result")));
}

#[test]
fn ranks_find_their_place_in_the_environment() {
    let finished = Job::start("environment", 4).finish();
    let cores = std::thread::available_parallelism().unwrap().get();
    let ranks: Vec<&str> = finished.outcome().split("Some(").skip(1).collect();
    assert_eq!(ranks.len(), 4, "{}", finished.stderr);
    for (rank, found) in ranks.iter().enumerate() {
        let threads = (cores / 4).max(1);
        for expected in [
            format!(
                "RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 GROUP_RANK=0 MASTER_ADDR=127.0.0.1"
            ),
            format!("RAYON_NUM_THREADS={threads}\""),
        ] {
            assert!(found.contains(&expected), "{expected} in {found}");
        }
        for same in ["MASTER_PORT=", "GIRANDOLE_SECRET=", "GIRANDOLE_JOB_ID="] {
            let value =
                |text: &str| text.split(' ').find_map(|word| word.strip_prefix(same)).map(str::to_owned);
            assert!(value(found).is_some_and(|value| value.len() > 3), "{same} in {found}");
            assert_eq!(value(found), value(ranks[0]));
        }
    }
}

#[test]
fn threads_that_are_set_stay() {
    let finished = Job::start("threads", 2).finish();
    assert_eq!(finished.outcome().matches("RAYON_NUM_THREADS=7\"").count(), 2, "{}", finished.stderr);
}

#[test]
fn a_rank_that_is_done_early_ends_nobody() {
    let finished = Job::start("early", 3).finish();
    assert_eq!(finished.outcome(), r#"[None, Some("went on"), Some("went on")]"#);
}

#[test]
fn what_cannot_be_started_is_named() {
    let config = SpawnConfig { program: Some("/nowhere/program".into()), ..SpawnConfig::default() };
    let missing = spawn(&config).unwrap_err();
    assert!(matches!(&missing, Error::Comm(comm::Error::InvalidArgument { what, .. }) if what == "program"));
    assert!(
        missing.to_string().starts_with("program: got /nowhere/program; it cannot be run: "),
        "{missing}"
    );
    let none = spawn(&SpawnConfig { world_size: 0, ..SpawnConfig::default() }).unwrap_err();
    assert!(matches!(none, Error::Comm(comm::Error::InvalidArgument { what, .. }) if what == "world_size"));
}

#[test]
fn when_a_rank_cannot_be_started_those_before_it_are_ended() {
    let finished = Job::start("no room", 14).finish();
    let outcome = finished.outcome();
    assert!(outcome.starts_with("cannot start rank ") && outcome.contains(" of 14"), "{outcome}");
    assert!(!outcome.contains("rank 0 "), "{outcome}");
}
