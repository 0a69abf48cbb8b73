//! Two runs with one folder for checkpoints: the second is refused, and the first is not disturbed.

use std::fs;

use rustix::process::{Signal, kill_process};

use crate::common::{Folder, Girandole, Session, refuse_with};

const TRANSFORMER: [&str; 5] = ["--epochs", "1000000", "--checkpoint-every", "1", "--checkpoint-dir"];

/// The file that names the latest checkpoint.
fn latest(folder: &Folder) -> Option<String> {
    fs::read_to_string(folder.path("checkpoints/latest")).ok()
}

/// Waits until a run has written a checkpoint more.
fn writes(run: &mut Session, folder: &Folder) {
    let before = latest(folder);
    run.until("a checkpoint more", || latest(folder) != before);
    assert_ne!(latest(folder), before, "it has ended");
}

/// Asserts that another run is refused while one runs, which then writes further checkpoints.
fn refused(run: &mut Session, command: &Girandole, arguments: &[&str], folder: &Folder) {
    let (error, code) = refuse_with(&mut command.command(), arguments);
    let place = folder.path("checkpoints").canonicalize().unwrap();
    let begin = format!("error: {}: another run keeps its checkpoints there, begun ", place.display());
    assert!(error.starts_with(&begin) && error.contains(" ago by process "), "{error}");
    assert_eq!(code, 2);
    writes(run, folder);
}

#[test]
fn a_second_run_is_refused_as_long_as_a_process_of_the_first_lives() {
    let (command, folder) = (Girandole("ddp-transformer"), Folder::new());
    let dir = folder.argument("checkpoints");
    let resume = [&TRANSFORMER[..], &[&dir, "--resume"]].concat();
    let mut run = Session::start(&command, &resume);
    writes(&mut run, &folder);
    refused(&mut run, &command, &resume, &folder);
    refused(&mut run, &command, &resume[..6], &folder);
    // Killed, it holds nothing any more.
    run.kill(0);
    let mut next = Session::start(&command, &resume);
    writes(&mut next, &folder);
    next.kill(1);
    command.succeed(&["--epochs", "1", "--checkpoint-dir", &folder.argument("other")]);
    assert!(!folder.path("other/in-use").exists(), "the last process removes the file");
}

#[test]
fn the_folder_stays_in_use_when_another_rank_writes_on() {
    let (command, folder) = (Girandole("ddp-transformer"), Folder::new());
    let dir = folder.argument("checkpoints");
    let arguments = [&TRANSFORMER[..], &[&dir, "--resume", "--elastic", "1:3"]].concat();
    let mut run = Session::start(&command, &arguments);
    writes(&mut run, &folder);
    for _ in 0..2 {
        let first = run.ranks()[0];
        kill_process(first, Signal::KILL).unwrap();
        // Twice, as the first one may be the lost rank's last.
        writes(&mut run, &folder);
        writes(&mut run, &folder);
        refused(&mut run, &command, &arguments, &folder);
    }
    run.kill(0);
}

#[test]
fn runs_of_language_models_too() {
    let (command, folder) = (Girandole("pretrain"), Folder::new());
    fs::write(folder.path("text.txt"), "to be or not to be, that is the question").unwrap();
    let [text, out, dir] = ["text.txt", "out", "checkpoints"].map(|name| folder.argument(name));
    let sizes = ["--layers", "1", "--hidden", "8", "--heads", "2", "--length", "8", "--batch-size", "2"];
    let files = ["--data", &text, "--out", &out, "--checkpoint-dir", &dir, "--checkpoint-every", "1"];
    let long = ["--steps", "1000000", "--resume", "--mesh", "shard=2"];
    let arguments = [&sizes[..], &files, &long].concat();
    let mut run = Session::start(&command, &arguments);
    writes(&mut run, &folder);
    refused(&mut run, &command, &arguments, &folder);
    run.kill(1);
}
