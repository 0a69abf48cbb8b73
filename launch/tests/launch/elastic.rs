//! Elastic jobs, which continue without some of their ranks.

use std::process::exit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Device, Tensor};
use comm::{Communicator, ElasticGroup, Operation, ReduceOp, Tcp, TcpConfig};
use launch::{EXIT_CHECKPOINTED, ElasticJob, SpawnConfig, report_result};
use rustix::process::{Signal, getpid, kill_process};

use crate::job::{Finished, Job};
use crate::roles::{forever, ready, see_the_end_of_rank_1};

/// Longer than the launcher needs to end a rank that it does not wait for.
const A_WHILE: Duration = Duration::from_millis(500);
/// A test that takes longer than this has failed; nothing takes nearly as long.
const LIMIT: Duration = Duration::from_secs(60);

/// Configuration of a launcher that does not wait at all for excluded ranks.
pub(crate) fn config(config: SpawnConfig) -> SpawnConfig {
    let elastic = ElasticJob { finish: Duration::ZERO, ..ElasticJob::default() };
    let env = vec![("GIRANDOLE_TIMEOUT".into(), "3".into())];
    SpawnConfig { elastic: Some(elastic), env, ..config }
}

/// Rank 1 succeeds at once, rank 0 some time after it.
pub(crate) fn at_work(rank: usize) {
    see_the_end_of_rank_1(rank);
    if rank == 0 {
        std::thread::sleep(A_WHILE);
        report_result("worked on").unwrap();
    }
}

/// Rank 1 leaves with a checkpoint, as one that was asked to by itself, and rank 0 works on for some time.
pub(crate) fn left_with_a_checkpoint(rank: usize) {
    let _group = Tcp::connect(&TcpConfig::from_env().unwrap()).unwrap();
    if rank == 1 {
        exit(EXIT_CHECKPOINTED);
    }
    std::thread::sleep(2 * A_WHILE);
    report_result("worked on").unwrap();
}

/// The last rank stops. The others continue without it, print this number of lines of 1000 bytes, and succeed.
pub(crate) fn left_behind(rank: usize, lines: usize) {
    left_behind_after(rank, [0, lines]);
}

/// The same with lines before and after the group without the last rank is formed.
fn left_behind_after(rank: usize, [before, after]: [usize; 2]) {
    let config = TcpConfig::from_env().unwrap();
    let group = Tcp::connect(&config).unwrap();
    if rank + 1 == config.world_size {
        kill_process(getpid(), Signal::STOP).unwrap();
        forever();
    }
    let one = Tensor::new(&[1u32], &Device::Cpu).unwrap();
    let error = group.run(Operation::AllReduce { tensor: one, op: ReduceOp::Sum }).unwrap_err();
    assert!(error.is_loss(), "{error}");
    let print = |lines: usize| (0..lines).for_each(|line| println!("{line:0999}"));
    print(if group.rank() == 0 { before } else { 0 });
    let group = group.shrink().unwrap();
    print(if group.rank() == 0 { after } else { 0 });
    report_result(&format!("one of {}", group.world_size())).unwrap();
}

/// Like `left_behind`, but the others fail in the end, and the lines are printed before the group without the last rank
/// is formed.
pub(crate) fn all_but_one_fail(rank: usize, lines: usize) {
    left_behind_after(rank, [lines, 0]);
    exit(3);
}

/// Configuration of a launcher that starts up to `replace` ranks in place of lost ones, and waits for them. They report
/// themselves that they have joined, possibly after the others have ended.
pub(crate) fn with_more(replace: usize, plain: SpawnConfig) -> SpawnConfig {
    let elastic = ElasticJob { replace, finish: LIMIT, ..ElasticJob::default() };
    SpawnConfig { elastic: Some(elastic), ..config(plain) }
}

/// Rank 1 fails, and rank 0 does so as soon as the replacement asks to join.
pub(crate) fn fail_before_the_newcomer_is_in(rank: usize) {
    let group = Tcp::connect(&TcpConfig::from_env().unwrap()).unwrap();
    let began = Instant::now();
    while rank == 0 && group.waiting() == 0 {
        assert!(began.elapsed() < LIMIT, "nobody comes");
        std::thread::sleep(Duration::from_millis(1));
    }
    exit(3);
}

/// All ranks but the first wait to be killed. Rank 0 continues with a replacement, or alone.
pub(crate) fn replaced(rank: usize, is_replaced: bool) {
    let group = Tcp::connect(&TcpConfig::from_env().unwrap()).unwrap();
    if std::env::var_os("GIRANDOLE_NEWCOMER").is_none() {
        ready(rank);
        if rank > 0 {
            forever();
        }
    }
    let began = Instant::now();
    while rank == 0 && is_replaced && group.waiting() == 0 {
        assert!(began.elapsed() < LIMIT, "nobody comes");
        std::thread::sleep(Duration::from_millis(1));
    }
    let size = match rank {
        0 => group.grow(2).unwrap().world_size(),
        _ => group.world_size(),
    };
    report_result(&format!("one of {size}")).unwrap();
}

/// Rank 1 fails, and only then rank 0 reports to the launcher that they had formed a group.
pub(crate) fn met_late(rank: usize) {
    see_the_end_of_rank_1(rank);
    if rank == 1 {
        exit(3);
    }
    std::thread::sleep(A_WHILE);
    println!("\u{1}girandole-met:");
    std::thread::sleep(A_WHILE);
    report_result("worked on").unwrap();
}

/// Rank 1 ends well, and when the launcher knows that, rank 0 fails.
pub(crate) const LAST_FAILS: &str = r#"
printf '\001girandole-met:\n'
[ $RANK = 1 ] && exit 0
until grep -qx 1 "$GIRANDOLE_ELASTIC_ENDED" 2> /dev/null; do sleep 0.01; done
exit 3"#;

/// Rank 1 fails, and only when the launcher knows that, rank 0 reports that they had formed a group, and ends well.
pub(crate) const MET_AT_THE_END: &str = r#"
[ $RANK = 1 ] && exit 3
until grep -qx 1 "$GIRANDOLE_ELASTIC_ENDED" 2> /dev/null; do sleep 0.01; done
printf '\001girandole-met:\n'"#;

/// Two ranks at least, and one replacement.
pub(crate) fn at_the_least(plain: SpawnConfig) -> SpawnConfig {
    let mut config = with_more(1, plain);
    config.elastic.as_mut().unwrap().min = 2;
    config
}

/// At least two of three ranks, and two replacements.
pub(crate) fn filled_up_config(plain: SpawnConfig) -> SpawnConfig {
    let mut config = with_more(2, plain);
    config.elastic.as_mut().unwrap().min = 2;
    config
}

/// All ranks but the first wait to be killed. Rank 0 lets two new ranks join at once.
pub(crate) fn filled_up(rank: usize) {
    let group = Tcp::connect(&TcpConfig::from_env().unwrap()).unwrap();
    if rank > 2 {
        return report_result(&format!("one of {}", group.world_size())).unwrap();
    }
    ready(rank);
    if rank > 0 {
        forever();
    }
    let began = Instant::now();
    while group.waiting() < 2 {
        assert!(began.elapsed() < LIMIT, "nobody comes");
        std::thread::sleep(Duration::from_millis(1));
    }
    report_result(&format!("one of {}", group.grow(3).unwrap().world_size())).unwrap();
}

/// Configuration of a launcher that replaces two ranks, of which none may be missing.
pub(crate) fn replaced_when_it_ends_config(plain: SpawnConfig) -> SpawnConfig {
    let mut config = with_more(2, plain);
    config.elastic.as_mut().unwrap().min = 2;
    config
}

/// Rank 1 waits to be killed, and rank 2, which takes its place, stops. Rank 0 goes on without each, says so, and waits for
/// a new rank.
pub(crate) fn replaced_when_it_ends(rank: usize) {
    let mut group: Arc<dyn Communicator> = Arc::new(Tcp::connect(&TcpConfig::from_env().unwrap()).unwrap());
    if [1, 2].contains(&rank) {
        ready(rank);
        if rank == 2 {
            kill_process(getpid(), Signal::STOP).unwrap();
        }
        forever();
    }
    for _ in 0..if rank == 0 { 2 } else { 0 } {
        let one = Tensor::new(&[1u32], &Device::Cpu).unwrap();
        let error = group.run(Operation::AllReduce { tensor: one, op: ReduceOp::Sum }).unwrap_err();
        assert!(error.is_loss(), "{error}");
        group = group.elastic().unwrap().shrink().unwrap();
        ready(rank);
        let began = Instant::now();
        while group.elastic().unwrap().waiting() == 0 {
            assert!(began.elapsed() < LIMIT, "nobody comes");
            std::thread::sleep(Duration::from_millis(1));
        }
        group = group.elastic().unwrap().grow(2).unwrap();
    }
    report_result(&format!("one of {}", group.world_size())).unwrap();
}

/// Removes the program file of ranks with this role, and then kills one of them.
fn without_its_file(role: &str) -> Finished {
    let job = Job::start_copy(role, 2);
    // The launcher has received the report that they have formed a group before it forwards this.
    let ranks = job.ready(2);
    job.remove_copy();
    kill_process(ranks[1], Signal::KILL).unwrap();
    job.finish()
}

/// Only Linux can start a program whose file was removed.
#[cfg(not(portable))]
#[test]
fn a_lost_rank_is_replaced_where_the_file_of_the_program_is_gone() {
    let finished = without_its_file("replaced");
    assert_eq!(finished.outcome(), r#"[Some("one of 2"), None, Some("one of 2")]"#, "{}", finished.stderr);
}

#[test]
fn where_no_rank_can_be_started_in_place_of_a_lost_one_the_others_go_on() {
    let finished = without_its_file("not replaced");
    assert_eq!(finished.outcome(), r#"[Some("one of 1"), None, None]"#, "{}", finished.stderr);
}

#[test]
fn where_no_rank_can_be_started_and_too_few_are_left_the_job_fails() {
    let finished = without_its_file("not replaced, at the least");
    let outcome = finished.outcome();
    assert!(outcome.starts_with("rank 1 (pid ") && outcome.contains("SIGKILL"), "{}", finished.stderr);
}

#[test]
fn a_rank_is_replaced_where_too_few_are_left_without_it() {
    let job = Job::start("replaced, at the least", 2);
    kill_process(job.ready(2)[1], Signal::KILL).unwrap();
    let finished = job.finish();
    assert_eq!(finished.outcome(), r#"[Some("one of 2"), None, Some("one of 2")]"#, "{}", finished.stderr);
}

#[test]
fn a_rank_that_fails_when_the_others_have_ended_well_is_no_loss_to_go_on_without() {
    let finished = Job::start("last fails", 2).finish();
    let outcome = finished.outcome();
    assert!(outcome.starts_with("rank 0 (pid ") && outcome.contains("code 3"), "{}", finished.stderr);
}

#[test]
fn one_that_fails_before_the_others_end_well_is_lost_even_where_that_they_had_met_is_heard_at_the_end() {
    let finished = Job::start("met at the end", 2).finish();
    assert_eq!(finished.outcome(), "[None, None]", "{}", finished.stderr);
}

#[test]
fn a_rank_that_could_be_started_after_another_could_not_is_known_by_its_place() {
    let mut job = Job::start_copy("replaced by the second", 3);
    let ranks = job.ready(3);
    job.remove_copy();
    kill_process(ranks[1], Signal::KILL).unwrap();
    job.wait_until_it_says("no rank can be started in the place of rank 1");
    job.put_back_copy();
    kill_process(ranks[2], Signal::KILL).unwrap();
    let finished = job.finish();
    let outcome = r#"[Some("one of 2"), None, None, Some("one of 2"), None]"#;
    assert_eq!(finished.outcome(), outcome, "{}", finished.stderr);
}

#[test]
fn a_rank_that_fails_before_the_launcher_hears_that_they_have_met_is_lost_as_any_other() {
    let finished = Job::start("met late", 2).finish();
    assert_eq!(finished.outcome(), r#"[Some("worked on"), None]"#, "{}", finished.stderr);
}

#[test]
fn newcomers_on_their_way_count_among_those_that_are_left() {
    let mut job = Job::start("filled up", 3);
    let ranks = job.ready(3);
    kill_process(ranks[2], Signal::KILL).unwrap();
    job.wait_until_it_says("rank 3 takes its place");
    kill_process(ranks[1], Signal::KILL).unwrap();
    let finished = job.finish();
    let outcome = r#"[Some("one of 3"), None, None, Some("one of 3"), Some("one of 3")]"#;
    assert_eq!(finished.outcome(), outcome, "{}", finished.stderr);
}

/// The launcher hears that the others go on without a rank before it hears of its end.
#[test]
fn a_rank_that_was_left_behind_is_replaced_when_it_ends() {
    let job = Job::start("replaced when it ends", 2);
    kill_process(job.ready_rank(1), Signal::KILL).unwrap();
    job.ready_rank(0);
    let second = job.ready_rank(2);
    job.ready_rank(0);
    std::thread::sleep(A_WHILE);
    kill_process(second, Signal::KILL).unwrap();
    let finished = job.finish();
    let outcome = r#"[Some("one of 2"), None, None, Some("one of 2")]"#;
    assert_eq!(finished.outcome(), outcome, "{}", finished.stderr);
}

#[test]
fn where_all_that_did_the_work_have_failed_nobody_waits_for_one_that_was_left_behind() {
    let finished = Job::start("all but one fail", 3).finish();
    assert!(finished.outcome().contains("exited with code 3"), "{}", finished.stderr);
}

/// The report that the others exclude one rank comes after lines that are not read before those ranks have ended.
#[test]
fn that_one_was_left_behind_may_be_heard_after_the_ends_of_the_others() {
    let job = Job::start_unread("all but one fail after lines", 3);
    job.wait_until_full();
    let began = Instant::now();
    // The launcher, and the stopped rank.
    while job.processes().len() > 2 {
        assert!(began.elapsed() < LIMIT, "ranks are left");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(A_WHILE);
    let finished = job.read().finish();
    assert!(finished.outcome().contains("exited with code 3"), "{}", finished.stderr);
}

#[test]
fn where_all_have_failed_nobody_waits_for_one_that_was_not_let_in() {
    let finished = Job::start("fail before the newcomer is in", 2).finish();
    let outcome = finished.outcome();
    assert!(outcome.contains("exited with code 3") && !outcome.contains("rank 2"), "{}", finished.stderr);
}

#[test]
fn a_rank_that_leaves_with_a_checkpoint_does_not_end_the_others() {
    let finished = Job::start("left with a checkpoint", 2).finish();
    assert_eq!(finished.outcome(), r#"[Some("worked on"), None]"#, "{}", finished.stderr);
}

#[test]
fn a_rank_that_works_on_when_another_has_ended_well_is_not_ended() {
    let finished = Job::start("at work", 2).finish();
    assert_eq!(finished.outcome(), r#"[Some("worked on"), None]"#, "{}", finished.stderr);
}

#[test]
fn a_rank_that_stands_still_and_was_left_behind_is_ended_when_the_others_are_done() {
    let finished = Job::start("left behind", 3).finish();
    assert_eq!(finished.outcome(), r#"[Some("one of 2"), Some("one of 2"), None]"#, "{}", finished.stderr);
}

#[test]
fn what_the_others_have_printed_waits_for_a_slow_reader_all_the_same() {
    let job = Job::start_unread("talkative", 3);
    job.wait_until_full();
    // All of it fits into pipes, so the ranks that print can end; then the stopped one is ended.
    let began = Instant::now();
    while job.processes().len() > 1 {
        assert!(began.elapsed() < LIMIT, "ranks are left");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(A_WHILE);
    let finished = job.read().finish();
    let lines = finished.stdout.iter().filter(|line| line.len() == 999).count();
    assert_eq!(lines, 100, "{}", finished.stderr);
    assert_eq!(finished.outcome(), r#"[Some("one of 2"), Some("one of 2"), None]"#);
}
