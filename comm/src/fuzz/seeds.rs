//! Runs the fuzz targets on the seeds in `fuzz/`, and on random changes of them.

use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::TestRunner;

/// The name of a folder of seeds, and the function to run on each of them.
pub(crate) type Target = (&'static str, fn(&[u8]));

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

pub(crate) fn every_seed(targets: &[Target]) {
    for (target, run) in targets {
        seeds(target).iter().for_each(|seed| run(seed));
    }
}

pub(crate) fn every_change(targets: &[Target]) {
    let changes = prop::collection::vec(change(), 1..6);
    let any_change = (0..targets.len(), any::<Index>(), changes);
    let config = ProptestConfig { source_file: Some(file!()), ..ProptestConfig::with_cases(4000) };
    let outcome = TestRunner::new(config).run(&any_change, |(target, seed, changes)| {
        let (name, run) = targets[target];
        let seeds = seeds(name);
        let mut bytes = seeds[seed.index(seeds.len())].clone();
        changes.iter().for_each(|change| apply(&mut bytes, change));
        run(&bytes);
        Ok(())
    });
    outcome.unwrap();
}
