//! Ranks are lost, and the others continue.

use std::time::Duration;

use comm::{ElasticGroup, Tcp, TcpConfig};
use launch::EXIT_PEER_FAILED;
use rustix::process::Signal;

use crate::job::Job;

const TIMEOUT: f64 = 60.0;

fn without(world_size: usize, lost: &[usize]) -> Vec<usize> {
    (0..world_size).filter(|rank| !lost.contains(rank)).collect()
}

#[test]
fn any_one_may_be_lost() {
    for lost in 0..4 {
        let mut job = Job::start(4, TIMEOUT);
        job.kill(&[lost]);
        let left = without(4, &[lost]);
        job.wait_for_groups(&left);
        job.finish(&left);
    }
}

#[test]
fn two_at_once_may_be_lost_the_first_among_them() {
    for lost in [[0, 1], [0, 3], [1, 2]] {
        let mut job = Job::start(4, TIMEOUT);
        job.kill(&lost);
        let left = without(4, &lost);
        job.wait_for_groups(&left);
        job.finish(&left);
    }
}

#[test]
fn one_after_the_other_is_lost_until_one_is_left() {
    let mut job = Job::start(4, TIMEOUT);
    for lost in [0, 2, 1] {
        job.kill(&[lost]);
        let left: Vec<usize> = job.ranks.keys().copied().collect();
        job.wait_for_groups(&left);
    }
    job.finish(&[3]);
}

#[test]
fn a_rank_that_stands_still_is_left_behind_and_told() {
    for stopped in [0, 2] {
        let mut job = Job::start(3, 2.0);
        job.signal(stopped, Signal::STOP);
        let left = without(3, &[stopped]);
        left.iter().for_each(|rank| job.wait_for_group(*rank, &left));
        job.signal(stopped, Signal::CONT);
        let ending = job.finish_one(stopped);
        assert_eq!(ending.code, Some(EXIT_PEER_FAILED), "{ending:?}");
        assert!(ending.lines.iter().any(|line| line.contains("is excluded")), "{ending:?}");
        job.finish(&left);
    }
}

#[test]
fn one_that_wakes_while_another_leads_is_no_reason_to_wait_for_each_other() {
    let mut job = Job::start(4, 40.0);
    job.signal(1, Signal::STOP);
    job.kill(&[0]);
    // After 5 s of silence the next rank leads, and waits for the stopped one just as long.
    std::thread::sleep(Duration::from_secs(7));
    job.signal(1, Signal::CONT);
    job.wait_for_groups(&[1, 2, 3]);
    job.finish(&[1, 2, 3]);
}

#[test]
fn half_without_the_first_does_not_go_on_while_the_other_half_may() {
    let mut job = Job::start(2, 2.0);
    job.signal(0, Signal::STOP);
    let ending = job.finish_one(1);
    assert_eq!(ending.code, Some(EXIT_PEER_FAILED), "{ending:?}");
    assert!(ending.lines.iter().any(|line| line.contains("rank 0 may still be there")), "{ending:?}");
}

#[test]
fn a_group_that_was_not_made_to_change_says_so() {
    let comm = Tcp::connect(&TcpConfig::default()).unwrap();
    for error in [comm.shrink().unwrap_err(), comm.grow(2).unwrap_err()] {
        assert!(error.to_string().contains("GIRANDOLE_ELASTIC=1"), "{error}");
    }
}
