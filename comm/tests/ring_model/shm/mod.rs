//! A writer and a reader that sleep, like those of `src/transport/hybrid_links.rs`, until the other end wakes them.

mod region;
#[path = "../../../src/transport/shm/ring.rs"]
mod ring;
mod wake_up;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use region::{CAPACITY, Region, Without, take_out};
use ring::{Reader, Writer, fence_before_recheck};
use wake_up::WakeUp;

/// Each message fills the ring, so that both ends have to wait.
const MESSAGES: u8 = 2;
/// How often one end may be preempted by the other.
const PREEMPTIONS: usize = 3;

fn send(mut writer: Writer, room: &WakeUp) {
    for message in 1..=MESSAGES {
        while writer.write(&[], &[message; CAPACITY]).unwrap() == 0 {
            writer.expect_room(true);
            fence_before_recheck();
            if !writer.has_room().unwrap() {
                room.wait();
            }
            writer.expect_room(false);
        }
    }
}

fn receive(mut reader: Reader, bytes: &WakeUp) {
    for message in 1..=MESSAGES {
        let mut got = [0; CAPACITY];
        while reader.read(&mut got).unwrap() == 0 {
            reader.expect_bytes(true);
            fence_before_recheck();
            if !reader.has_new_bytes().unwrap() {
                bytes.wait();
            }
            reader.expect_bytes(false);
        }
        assert_eq!(got, [message; CAPACITY]);
    }
}

/// Checks all orders of steps, and returns their number. Panics if the received bytes are wrong, if both ends access
/// the same bytes at once, or if an end sleeps indefinitely.
fn check(without: Without, preemptions: usize) -> usize {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    let runs = Arc::new(AtomicUsize::new(0));
    let count = runs.clone();
    model.check(move || {
        take_out(without);
        count.fetch_add(1, Relaxed);
        let region = Region::new();
        let [bytes, room] = [(); 2].map(|()| Arc::new(WakeUp::new()));
        let writer = Writer::new(region.clone(), bytes.clone());
        let reader = Reader::new(region, room.clone());
        let sender = loom::thread::spawn(move || send(writer, &room));
        receive(reader, &bytes);
        sender.join().unwrap();
    });
    runs.load(Relaxed)
}

#[test]
fn whatever_a_processor_may_do_bytes_arrive_and_nobody_sleeps_for_ever() {
    let given = std::env::var("GIRANDOLE_RING_MODEL").ok();
    let runs = check(Without::Nothing, given.map_or(PREEMPTIONS, |given| given.parse().unwrap()));
    println!("{runs} orders");
    assert!(runs > 1000, "{runs}");
}

#[test]
#[should_panic = "Causality violation"]
fn without_acquire_the_ends_meet_in_the_same_bytes() {
    check(Without::Acquire, PREEMPTIONS);
}

#[test]
#[should_panic = "Causality violation"]
fn without_release_the_ends_meet_in_the_same_bytes() {
    check(Without::Release, PREEMPTIONS);
}

#[test]
#[should_panic = "deadlock"]
fn without_the_fence_an_end_sleeps_for_ever() {
    check(Without::Fence, PREEMPTIONS);
}
