//! Ranks on different processors: what must be equal to the bit is, and all else is close.
//!
//! By default both ranks run this program. `GIRANDOLE_MIXED` is a command that starts it on another processor, for rank
//! 1: `qemu-aarch64-static PROGRAM` with this program built for ARM, or `qemu-x86_64-static -cpu max PROGRAM` with this
//! very program, for a processor that has AVX2 and no AVX-512. `scripts/test-mixed.sh` uses both.
#![allow(clippy::unwrap_used)]

mod collectives;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod layouts;
mod pair;

use std::collections::BTreeMap;
use std::sync::Arc;

use girandole::Result;
use girandole::comm::{Communicator, Local, Transport};
use pair::{PART, run_pair};

/// Results of a rank: names and bytes.
type Outcome = BTreeMap<String, Vec<u8>>;

fn run(comm: Arc<dyn Communicator>, job: &str) -> Result<Outcome> {
    match job.split_once(' ') {
        Some(("copies", optimizer)) => copies::train(comm, optimizer),
        Some(("layout", layout)) => layouts::train(comm, layout),
        _ => Ok(collectives::all(&*comm)?),
    }
}

/// One rank of a job, if another test of this file has started this program for that.
#[test]
fn one_rank() {
    if let Ok(part) = std::env::var(PART) {
        pair::be_a_rank(&part, run);
    }
}

/// Returns the names of results that differ, each with the number of differing bytes.
fn differences(a: &Outcome, b: &Outcome) -> Vec<String> {
    assert!(a.keys().eq(b.keys()), "{:?} and {:?}", a.keys(), b.keys());
    let differing = |(a, b): (&Vec<u8>, &Vec<u8>)| a.iter().zip(b).filter(|(a, b)| a != b).count();
    let all =
        a.iter().map(|(name, bytes)| (name, bytes.len() == b[name].len(), differing((bytes, &b[name]))));
    let different = all.filter(|(_, same_len, count)| !same_len || *count > 0);
    different.map(|(name, _, count)| format!("{name}: {count} of {} bytes", a[name].len())).collect()
}

#[test]
fn collectives_give_the_bits_that_one_processor_gives() {
    let expected = Local::run_shared(2, |comm| collectives::all(&*comm)).unwrap();
    assert!(expected[0].len() > 200);
    for transport in [Transport::Auto, Transport::Tcp] {
        let got = run_pair("collectives", transport);
        for (rank, (got, expected)) in got.iter().zip(&expected).enumerate() {
            assert_eq!(differences(got, expected), Vec::<String>::new(), "{transport:?}, rank {rank}");
        }
    }
}

#[test]
fn copies_of_a_model_are_equal_to_the_bit_after_200_steps() {
    for optimizer in copies::OPTIMIZERS {
        let [a, b] = run_pair(&format!("copies {optimizer}"), Transport::Auto);
        assert!(a.len() >= 10, "{optimizer}");
        assert_eq!(differences(&a, &b), Vec::<String>::new(), "{optimizer}");
    }
}

#[test]
fn layouts_train_as_one_process_does() {
    let alone = Local::run_shared(1, |comm| Ok(layouts::train(comm, ""))).unwrap().remove(0).unwrap();
    let expected = layouts::losses(&alone);
    assert!(expected.last() < expected.first(), "{expected:?}");
    for layout in ["dp=2", "shard=2", "tp=2", "pp=2"] {
        for got in run_pair(&format!("layout {layout}"), Transport::Auto) {
            let losses = layouts::losses(&got);
            let gap = losses.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(gap < 1e-5, "{layout}: losses are {gap} off");
        }
    }
}
