//! New ranks join.

use crate::job::Job;

#[test]
fn a_newcomer_is_let_in_between_two_steps() {
    let mut job = Job::start(2, 60.0);
    job.newcomer(2);
    job.wait_for_groups(&[0, 1, 2]);
    job.newcomer(3);
    job.wait_for_groups(&[0, 1, 2, 3]);
    job.finish(&[0, 1, 2, 3]);
}

#[test]
fn the_group_is_found_when_its_first_rank_is_lost() {
    let mut job = Job::start(3, 60.0);
    job.kill(&[0]);
    job.wait_for_groups(&[1, 2]);
    job.newcomer(3);
    job.wait_for_groups(&[1, 2, 3]);
    job.kill(&[1, 2]);
    job.wait_for_groups(&[3]);
    job.newcomer(4);
    job.wait_for_groups(&[3, 4]);
    job.finish(&[3, 4]);
}

#[test]
fn one_that_cannot_be_let_in_is_told_why_and_the_others_go_on() {
    let mut job = Job::start(2, 60.0);
    let other = "5a".repeat(32);
    for (number, variables, part) in [
        (1, &[][..], "there is a rank 1 already"),
        (2, &[("GIRANDOLE_SECRET", other.as_str()), ("GIRANDOLE_TIMEOUT", "1")], "proof"),
        (2, &[("GIRANDOLE_TLS", "all"), ("GIRANDOLE_TIMEOUT", "1")], "set GIRANDOLE_TLS alike on every rank"),
    ] {
        let ending = job.misfit(number, variables);
        assert!(ending.code.is_some_and(|code| code != 0), "{ending:?}");
        assert!(ending.lines.iter().any(|line| line.contains(part)), "{part}: {ending:?}");
    }
    job.newcomer(2);
    job.wait_for_groups(&[0, 1, 2]);
    job.finish(&[0, 1, 2]);
}
