//! The seeds of `fuzz/`, and changes of them, without a fuzzer.

use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::Index;

/// The name of a folder, and what is to take what is in it.
type Target = (&'static str, fn(&[u8]));

const TARGETS: [Target; 6] = [
    ("announcement", super::announcement),
    ("control", crate::rendezvous::fuzz::control),
    ("council", crate::launch::fuzz_council),
    ("environment", crate::rendezvous::scheduler::fuzz_environment),
    ("handshake", crate::rendezvous::fuzz::handshake),
    ("meeting", crate::rendezvous::fuzz::meeting),
];

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds").join(target);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    files.into_iter().map(|file| std::fs::read(file).unwrap()).collect()
}

#[derive(Debug, Clone)]
enum Change {
    Put(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize),
}

fn change() -> impl Strategy<Value = Change> {
    let few = || prop::collection::vec(any::<u8>(), 1..9);
    prop_oneof![
        (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Change::Put(at, byte)),
        (any::<Index>(), few()).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (any::<Index>(), 1..40_usize).prop_map(|(at, len)| Change::Remove(at, len)),
        (any::<Index>(), 1..40_usize).prop_map(|(at, len)| Change::Repeat(at, len)),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    if bytes.is_empty() {
        return bytes.push(0);
    }
    let len = bytes.len();
    match change {
        Change::Put(at, byte) => bytes[at.index(len)] = *byte,
        Change::Insert(at, few) => drop(bytes.splice(at.index(len)..at.index(len), few.iter().copied())),
        Change::Remove(at, count) => drop(bytes.drain(at.index(len)..(at.index(len) + count).min(len))),
        Change::Repeat(at, count) => {
            bytes.extend_from_within(at.index(len)..(at.index(len) + count).min(len))
        }
    }
}

#[test]
fn every_seed_passes() {
    for (target, run) in TARGETS {
        seeds(target).iter().for_each(|seed| run(seed));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn every_change_of_a_seed_passes(target in 0..TARGETS.len(), seed: Index, changes in prop::collection::vec(change(), 1..6)) {
        let (name, run) = TARGETS[target];
        let seeds = seeds(name);
        let mut bytes = seeds[seed.index(seeds.len())].clone();
        changes.iter().for_each(|change| apply(&mut bytes, change));
        run(&bytes);
    }
}
