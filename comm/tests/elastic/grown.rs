//! New ranks come.

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
