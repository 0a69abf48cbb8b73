//! Tests of ranks that check one output path at the same time.

use std::sync::Barrier;
use std::thread;

use super::*;

/// Runs `look` on many threads simultaneously, like ranks that another launcher started.
fn at_once(look: impl Fn() -> std::result::Result<(), FileError> + Sync) {
    const RANKS: usize = 8;
    let barrier = Barrier::new(RANKS);
    thread::scope(|scope| {
        for _ in 0..RANKS {
            scope.spawn(|| {
                for _ in 0..300 {
                    barrier.wait();
                    look().unwrap();
                }
            });
        }
    });
}

#[test]
fn ranks_that_look_together_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let (metrics, saved) = (folder.path().join("m.jsonl"), folder.path().join("w.safetensors"));
    at_once(|| check_in_place(&metrics));
    at_once(|| training::internal::check_writable(&saved));
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_one_rank_has_begun_stays_while_others_look() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.jsonl");
    at_once(|| {
        check_in_place(&path)?;
        fs::write(&path, "a line\n").unwrap();
        check_in_place(&path)
    });
    assert_eq!(fs::read_to_string(&path).unwrap(), "a line\n");
}

#[test]
fn places_that_cannot_be_written_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain");
    fs::write(&plain, "").unwrap();
    for path in ["", "no/such/m", "m/", "plain/m", ".", ".."].map(|name| folder.path().join(name)) {
        let Err(error) = check_in_place(&path) else { panic!("{} was accepted", path.display()) };
        let line = error.to_string();
        let reason = line.strip_prefix(&format!("cannot write {}: ", path.display()));
        assert!(reason.is_some_and(|reason| !reason.contains(".tmp")), "{line}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}
