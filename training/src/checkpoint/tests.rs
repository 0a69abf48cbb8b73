//! Checkpoint tests: a crash after each change to the disk, with and without the loss of unsynced changes.

use std::cell::{Cell, RefCell};
use std::fs;

use candle_core::{DType, Tensor};

use super::write::{Change, save};
use super::*;

fn checkpoint(step: u64) -> Checkpoint {
    let tensors =
        |count| HashMap::from([("w".to_string(), Tensor::full(step as f32, count, &Device::Cpu).unwrap())]);
    let tensors =
        BTreeMap::from([("model".to_string(), tensors(300)), ("optimizer".to_string(), tensors(700))]);
    Checkpoint {
        epoch: step / 10,
        step,
        sampler: serde_json::json!({ "consumed": step }),
        tensors,
        ..Checkpoint::default()
    }
}

fn assert_is(loaded: &Checkpoint, step: u64) {
    assert_eq!((loaded.epoch, loaded.step), (step / 10, step));
    assert_eq!(loaded.sampler["consumed"], step);
    for (name, count) in [("model", 300), ("optimizer", 700)] {
        assert_eq!(
            loaded.tensors[name]["w"].to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(),
            vec![step as f32; count]
        );
    }
}

/// Saves, fails after `steps` changes, and returns whether the save completed and the changes made.
fn stopped(config: &CheckpointConfig, checkpoint: &Checkpoint, steps: usize) -> (bool, Vec<Change>) {
    let (left, changes) = (Cell::new(steps), RefCell::new(vec![]));
    let result = save(config, u64::MAX, checkpoint, &|change| {
        changes.borrow_mut().push(change);
        left.set(left.get().wrapping_sub(1));
        if left.get() == 0 { Err(Error::NoVariable { name: "crash".into() }) } else { Ok(()) }
    });
    (result.is_ok(), changes.into_inner())
}

/// Current path of what was at `path` when it was changed, after the renames in `later`.
fn now(path: &Path, later: &[Change]) -> PathBuf {
    later.iter().fold(path.to_path_buf(), |path, change| match change {
        Change::Renamed(from, to) => path.strip_prefix(from).map_or(path.clone(), |rest| to.join(rest)),
        _ => path,
    })
}

/// Simulates a power loss: unsynced files become empty, and if `names_too`, unsynced renames are undone.
fn lose_power(changes: &[Change], names_too: bool) {
    for (index, change) in changes.iter().enumerate().rev() {
        let later = &changes[index + 1..];
        let synced = |path: &Path| later.contains(&Change::Synced(path.to_path_buf()));
        match change {
            Change::Wrote(path) if !synced(path) => fs::write(now(path, later), "").unwrap(),
            Change::Renamed(from, to) if names_too && !synced(to.parent().unwrap()) => {
                // The test copied the overwritten file aside before the save.
                fs::rename(to, from).unwrap();
                let old = to.with_file_name("old-latest");
                if to.file_name().unwrap() == "latest" && old.exists() {
                    fs::copy(&old, to).unwrap();
                }
            }
            _ => {}
        }
    }
}

#[test]
fn a_crash_after_any_change_leaves_the_old_or_the_new_one_whole() {
    for (earlier, keep) in [(0, 1), (1, 2), (3, 1)] {
        for power in 0..3 {
            let mut steps = 1;
            loop {
                let folder = tempfile::tempdir().unwrap();
                let config = CheckpointConfig { dir: folder.path().to_path_buf(), keep };
                let checkpoints = Checkpoints::open(config.clone()).unwrap();
                for step in 1..=earlier {
                    checkpoints.save(&checkpoint(step)).unwrap();
                }
                if earlier > 0 {
                    fs::copy(folder.path().join("latest"), folder.path().join("old-latest")).unwrap();
                }
                let (done, changes) = stopped(&config, &checkpoint(100), steps);
                if power > 0 {
                    lose_power(&changes, power == 2);
                }
                let what =
                    format!("{earlier} kept {keep}, power {power}, step {steps}: {:?}", changes.last());
                match checkpoints.load_latest(&Device::Cpu).expect(&what) {
                    Some(found) if found.step == 100 => assert_is(&found, 100),
                    Some(found) => assert_is(&found, earlier),
                    None => assert_eq!(earlier, 0, "{what}"),
                }
                // The next save succeeds and removes unfinished files.
                checkpoints.save(&checkpoint(200)).expect(&what);
                assert_is(&checkpoints.load_latest(&Device::Cpu).unwrap().unwrap(), 200);
                assert!(checkpoints.list().unwrap().len() <= keep);
                let hidden = fs::read_dir(folder.path())
                    .unwrap()
                    .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'));
                assert_eq!(hidden.count(), 0, "{what}");
                if done {
                    assert!(steps > 12, "{steps}");
                    break;
                }
                steps += 1;
            }
        }
    }
}

#[test]
fn the_pointer_changes_last_and_after_all_is_on_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { dir: folder.path().to_path_buf(), keep: 1 };
    save(&config, u64::MAX, &checkpoint(1), &|_| Ok(())).unwrap();
    let (_, changes) = stopped(&config, &checkpoint(2), usize::MAX);
    let place = |f: &dyn Fn(&Change) -> bool| changes.iter().position(f).unwrap();
    let ends = |path: &Path, end: &str| path.ends_with(end);
    let named = place(&|c| matches!(c, Change::Renamed(_, to) if ends(to, "checkpoint-00000002")));
    let pointed = place(&|c| matches!(c, Change::Renamed(_, to) if ends(to, "latest")));
    let old_gone = place(&|c| matches!(c, Change::Renamed(from, _) if ends(from, "checkpoint-00000001")));
    let synced = |path: &Path| Change::Synced(path.to_path_buf());
    assert!(changes[named + 1] == synced(folder.path()) && changes[pointed + 1] == synced(folder.path()));
    assert!(named < pointed && pointed + 1 < old_gone);
    for change in &changes[..named] {
        if let Change::Wrote(path) | Change::Made(path) = change {
            assert!(changes[..named].contains(&synced(path)), "{path:?}");
        }
    }
}

#[test]
fn an_old_one_that_cannot_be_removed_is_no_failure() {
    let folder = tempfile::tempdir().unwrap();
    let config = CheckpointConfig { dir: folder.path().to_path_buf(), keep: 1 };
    let checkpoints = Checkpoints::open(config).unwrap();
    checkpoints.save(&checkpoint(1)).unwrap();
    let draft = checkpoints.begin().unwrap();
    // The path that the old one is renamed to before its removal.
    let in_the_way = folder.path().join(".unfinished-old-checkpoint-00000001");
    fs::create_dir(&in_the_way).unwrap();
    fs::write(in_the_way.join("file"), "").unwrap();
    draft.commit(&checkpoint(2), BTreeMap::new()).unwrap();
    assert_is(&checkpoints.load_latest(&Device::Cpu).unwrap().unwrap(), 2);
    assert_eq!(checkpoints.list().unwrap().len(), 2);
    // The next save removes all of them.
    checkpoints.save(&checkpoint(3)).unwrap();
    assert_eq!(checkpoints.list().unwrap().len(), 1);
    assert!(!in_the_way.exists());
}

#[test]
fn those_that_are_needed_beside_others_stay() {
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Checkpoints::open(CheckpointConfig { dir: folder.path().into(), keep: 2 }).unwrap();
    let steps = || -> Vec<u64> {
        let all = checkpoints.list().unwrap();
        all.iter().map(|folder| checkpoints.contents(folder).unwrap().step).collect()
    };
    checkpoints.save(&checkpoint(2)).unwrap();
    checkpoints.clone().keep_from(2);
    for step in [1, 2, 3, 4, 5] {
        checkpoints.save(&checkpoint(step)).unwrap();
    }
    assert_eq!(steps(), [2, 3, 4, 5]);
    checkpoints.keep_from(5);
    checkpoints.save(&checkpoint(6)).unwrap();
    assert_eq!(steps(), [5, 6]);
    checkpoints.keep_from(9);
    checkpoints.save(&checkpoint(7)).unwrap();
    assert_eq!(steps(), [5, 6, 7]);
}
