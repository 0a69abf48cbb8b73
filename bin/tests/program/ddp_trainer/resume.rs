//! Checkpoints: runs that resume from one, and runs that are not allowed to.

use std::path::Path;

use crate::common::{Folder, losses, metrics, text};
use crate::ddp_trainer::TRAINER;

/// Three epochs of five steps on two ranks, with checkpoints after steps 12 and 15.
const SHORT: [&str; 10] =
    ["--samples", "20", "--batch-size", "2", "--epochs", "3", "--checkpoint-every", "4", "--world-size", "2"];

/// Returns the checkpoint folder's path, and the arguments of a short run with checkpoints.
fn keeping(folder: &Folder) -> (String, Vec<String>) {
    let dir = folder.argument("checkpoints");
    let more = ["--checkpoint-dir", dir.as_str()];
    let arguments = SHORT.iter().chain(&more).map(|word| word.to_string()).collect();
    (dir, arguments)
}

fn run(arguments: &[String], more: &[&str]) -> String {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    text(&TRAINER.succeed(&arguments).stderr)
}

fn refuse(arguments: &[String], more: &[&str]) -> String {
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
    TRAINER.refuse(&arguments)
}

fn names(dir: &str) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_that_is_killed_again_and_again_ends_as_one_that_nobody_disturbs() {
    let arguments = ["--samples", "40", "--batch-size", "2", "--lr", "0.01", "--world-size", "2"];
    crate::common::kill_and_resume(&TRAINER, &arguments);
}

#[test]
fn a_run_goes_on_in_the_middle_of_an_epoch() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    let [whole, cut] = ["whole", "cut"].map(|name| folder.argument(name));
    let [whole_lines, cut_lines] = ["whole.jsonl", "cut.jsonl"].map(|name| folder.argument(name));
    let remarks = run(&arguments, &["--save", &whole, "--metrics", &whole_lines]);
    assert!(!remarks.contains("going on"), "{remarks}");
    assert_eq!(names(&dir), ["checkpoint-00000003", "checkpoint-00000004", "latest"]);
    // Step 12 is the second of the third epoch.
    let earlier = format!("--resume={dir}/checkpoint-00000003");
    std::fs::copy(&whole_lines, &cut_lines).unwrap();
    let remarks = run(&arguments, &[&earlier, "--save", &cut, "--metrics", &cut_lines]);
    assert!(
        remarks.contains(&format!("note: going on from {dir} at epoch 2, batch 2 (step 12)\n")),
        "{remarks}"
    );
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&cut).unwrap());
    assert_eq!(losses(cut_lines.as_ref()), losses(whole_lines.as_ref()));
    let summaries = metrics(cut_lines.as_ref()).iter().filter(|line| line["event"] == "summary").count();
    assert_eq!(summaries, 1, "that of the run that was cut off is gone");
}

#[test]
fn a_run_that_is_over_can_be_made_longer() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    run(&arguments, &[]);
    let [longer, whole] = ["longer", "whole"].map(|name| folder.argument(name));
    let more = |save| ["--epochs", "5", "--save", save];
    let twice = |more: &[&str]| {
        let arguments: Vec<String> =
            arguments.iter().filter(|word| !["--epochs", "3"].contains(&word.as_str())).cloned().collect();
        run(&arguments, more)
    };
    let remarks = twice(&[&["--resume"], &more(&longer)[..]].concat());
    assert!(remarks.contains(&format!("going on from {dir} at epoch 3, batch 0 (step 15)")), "{remarks}");
    TRAINER.succeed(&[&SHORT[..4], &SHORT[8..], &more(&whole)].concat());
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&longer).unwrap());
}

#[test]
fn a_run_that_is_further_than_it_is_to_go_is_refused() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    let save = folder.argument("w");
    run(&arguments, &[]);
    let epochs = |epochs: &str, more: &[&str]| -> Vec<String> {
        let words = arguments.iter().map(|word| if word == "3" { epochs.to_string() } else { word.clone() });
        words.chain(more.iter().map(|word| word.to_string())).collect()
    };
    let line = refuse(&epochs("2", &["--resume", "--save", &save]), &[]);
    let expected =
        format!("error: --epochs: got 2; the checkpoint in {dir} is at epoch 3, batch 0 (step 15) already; ");
    assert!(line.starts_with(&expected), "{line}");
    assert!(!std::path::Path::new(&save).exists());
    // The checkpoint is in the middle of the epoch after the last one.
    let earlier = format!("--resume={dir}/checkpoint-00000003");
    let line = refuse(&epochs("2", &[&earlier]), &[]);
    assert!(line.contains("is at epoch 2, batch 2 (step 12) already; "), "{line}");
    // If no steps are left, the model is still saved.
    let remarks = run(&epochs("3", &["--resume", "--save", &save]), &[]);
    assert!(remarks.contains("at epoch 3, batch 0 (step 15)"), "{remarks}");
    assert!(std::path::Path::new(&save).exists());
}

#[test]
fn other_initial_weights_than_those_of_the_run_are_refused() {
    let folder = Folder::new();
    let [first, second, save] = ["first", "second", "save"].map(|name| folder.argument(name));
    for (seed, path) in [("1", &first), ("2", &second)] {
        TRAINER.succeed(&["--epochs", "1", "--seed", seed, "--save", path]);
    }
    let (dir, arguments) = keeping(&folder);
    run(&arguments, &[]);
    let longer: Vec<String> =
        arguments.iter().map(|word| if word == "3" { "4".into() } else { word.clone() }).collect();
    let line = refuse(&longer, &["--resume", "--init", &first]);
    assert!(line.starts_with("error: --init: got a file with SHA-256 "), "{line}");
    let expected = format!(
        "; the run in {dir} began with random weights, and goes on with the weights of its checkpoint; leave it out"
    );
    assert!(line.contains(&expected), "{line}");
    // A run with initial weights can be resumed with the same --init, or without it.
    let other = folder.argument("other");
    let began: Vec<String> =
        arguments.iter().map(|word| if *word == dir { other.clone() } else { word.clone() }).collect();
    run(&began, &["--init", &first]);
    let line = refuse(&began, &["--resume", "--init", &second]);
    assert!(line.contains(" began with a file with SHA-256 "), "{line}");
    let remarks = run(&began, &["--resume", "--init", &first, "--save", &save]);
    assert!(remarks.contains("going on from"), "{remarks}");
    let weights = std::fs::read(&save).unwrap();
    run(&began, &["--resume", "--save", &save]);
    assert!(std::fs::read(&save).unwrap() == weights);
}

#[test]
fn without_a_checkpoint_it_starts_from_the_beginning_and_says_so() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    let lines = folder.argument("m.jsonl");
    std::fs::write(&lines, "{\"event\":\"step\",\"epoch\":0,\"batch\":0,\"loss\":1.0}\n").unwrap();
    let remarks = run(&arguments, &["--resume", "--metrics", &lines]);
    let expected = format!("note: no checkpoint in {dir} yet: starting from the beginning\n");
    assert!(remarks.ends_with(&expected), "{remarks}");
    assert_eq!(losses(lines.as_ref()).len(), 15, "an older file's steps do not stay");
}

#[test]
fn a_checkpoint_is_asked_for_by_its_path_or_its_name() {
    for by_name in [false, true] {
        let folder = Folder::new();
        let (dir, arguments) = keeping(&folder);
        run(&arguments, &[]);
        let path = format!("{dir}/checkpoint-00000003");
        let wanted = if by_name { "checkpoint-00000003" } else { path.as_str() };
        let remarks = run(&arguments, &["--resume", wanted]);
        assert!(remarks.contains(&format!("going on from {dir} at epoch 2, batch 2 (step 12)")), "{remarks}");
        let line = refuse(&arguments, &["--resume", "checkpoint-00000009"]);
        let expected = format!(
            "error: --resume: got checkpoint-00000009; there is no such folder; {dir} holds checkpoint-0000000"
        );
        assert!(line.starts_with(&expected), "{line}");
    }
}

#[test]
fn an_earlier_run_is_not_overwritten() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    run(&arguments, &[]);
    let before = names(&dir);
    let line = refuse(&arguments, &[]);
    assert!(
        line.contains(&format!("--checkpoint-dir: got {dir}; ")) && line.contains("give --resume"),
        "{line}"
    );
    assert_eq!(names(&dir), before);
}

/// `--resume` in a script that starts the first run, too: there is no checkpoint yet, and another run's metrics.
#[cfg(target_os = "linux")]
#[test]
fn without_a_checkpoint_the_metrics_of_an_earlier_run_are_kept_until_the_end() {
    let folder = Folder::new();
    let (_, arguments) = keeping(&folder);
    let lines = folder.argument("m.jsonl");
    std::fs::write(&lines, "of an earlier run\n").unwrap();
    let more = ["--resume", "--metrics", &lines, "--report", "/dev/full"];
    let output = TRAINER.command().args(&arguments).args(more).output().unwrap();
    assert!(!output.status.success() && text(&output.stderr).contains("/dev/full"), "{output:?}");
    assert_eq!(std::fs::read_to_string(folder.argument("m.jsonl.earlier")).unwrap(), "of an earlier run\n");
}

#[test]
fn another_run_does_not_go_on_from_it() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    run(&arguments, &[]);
    let without = |option: &str| -> Vec<String> {
        let place = arguments.iter().position(|word| word == option);
        let skip = |at: usize| place.is_some_and(|place| at == place || at == place + 1);
        arguments.iter().enumerate().filter(|(at, _)| !skip(*at)).map(|(_, word)| word.clone()).collect()
    };
    for (option, value, then) in [
        ("--seed", "1", "42"),
        ("--lr", "0.5", "0.001"),
        ("--batch-size", "3", "2"),
        ("--loss", "document", "mse"),
    ] {
        let line = refuse(&without(option), &["--resume", option, value]);
        let expected = format!("error: {option}: got {value}; the run in {dir} began with {then}; ");
        assert!(line.starts_with(&expected), "{line}");
    }
    let line = refuse(&without("--samples"), &["--resume", "--samples", "22"]);
    assert!(line.contains("--samples: got 22; ") && line.contains("began with 20"), "{line}");
}

#[test]
fn other_data_are_another_run() {
    let folder = Folder::new();
    let [dir, first, second, moved] = ["c", "a", "b", "moved"].map(|name| folder.argument(name));
    for (seed, path) in [(1, &first), (2, &second)] {
        let mut generator = sampler::Generator::new(seed);
        let tensor = |values: Vec<f32>, width: usize| {
            candle_core::Tensor::from_vec(values, (20, width), &candle_core::Device::Cpu).unwrap()
        };
        let x = tensor(generator.randn(400).unwrap(), 20);
        let y = tensor(generator.randn(20).unwrap(), 1);
        candle_core::safetensors::save(&[("x".to_string(), x), ("y".to_string(), y)].into(), path).unwrap();
    }
    let arguments = |data: &str, epochs: &str| {
        let all = [
            "--batch-size", "2", "--world-size", "2", "--checkpoint-dir", &dir, "--data", data, "--epochs",
            epochs,
        ];
        all.map(String::from).to_vec()
    };
    run(&arguments(&first, "1"), &[]);
    let line = refuse(&arguments(&second, "2"), &["--resume"]);
    let expected = "error: --data: got a file with SHA-256 ";
    assert!(line.starts_with(expected) && line.contains(" began with a file with SHA-256 "), "{line}");
    // The same data under another path.
    std::fs::rename(&first, &moved).unwrap();
    let remarks = run(&arguments(&moved, "2"), &["--resume"]);
    assert!(remarks.contains("at epoch 1, batch 0 (step 5)"), "{remarks}");
}

#[test]
fn a_report_shows_all_of_a_run_that_began_without_one() {
    let folder = Folder::new();
    let (_, arguments) = keeping(&folder);
    let page = folder.argument("report.html");
    run(&arguments, &[]);
    let longer: Vec<String> =
        arguments.iter().filter(|word| !["--epochs", "3"].contains(&word.as_str())).cloned().collect();
    run(&longer, &["--epochs", "4", "--resume", "--report", &page]);
    let html = std::fs::read_to_string(page).unwrap();
    let row = html.lines().find(|line| line.contains("DDP, 2 ranks</th>")).unwrap();
    assert!(row.contains("data-head=\"steps\">20</td>"), "{row}");
}

#[test]
fn another_number_of_ranks_goes_on_with_what_is_left() {
    let folder = Folder::new();
    let (dir, arguments) = keeping(&folder);
    run(&arguments, &[]);
    let lines = folder.argument("m.jsonl");
    let arguments = arguments[..arguments.len() - 4].to_vec();
    let earlier = format!("--resume={dir}/checkpoint-00000003");
    let more = ["--world-size", "3", "--checkpoint-dir", &dir, &earlier, "--metrics", &lines];
    let remarks = run(&arguments, &more);
    assert!(
        remarks.contains("it was made with world size 2, so what is left of the data is distributed again"),
        "{remarks}"
    );
    // 12 of 20 samples are left in the third epoch: four for each of three ranks, in two batches.
    let steps = metrics(lines.as_ref());
    let places: Vec<_> = steps
        .iter()
        .filter(|line| line["event"] == "step")
        .map(|line| (line["epoch"].clone(), line["batch"].clone()))
        .collect();
    assert_eq!(places, [(2.into(), 2.into()), (2.into(), 3.into())]);
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_offered() {
    let flip = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x10;
        std::fs::write(path, bytes).unwrap();
    };
    let cut = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 1]).unwrap();
    };
    for name in ["rank-00000.safetensors", "observer.safetensors", "checkpoint.json"] {
        for damage in [&flip as &dyn Fn(&Path), &cut] {
            let folder = Folder::new();
            let (dir, arguments) = keeping(&folder);
            run(&arguments, &[]);
            let (last, before) = (format!("{dir}/checkpoint-00000004"), format!("{dir}/checkpoint-00000003"));
            damage(&Path::new(&last).join(name));
            let line = refuse(&arguments, &["--resume"]);
            assert!(line.starts_with(&format!("error: `{last}/{name}` cannot be trusted: ")), "{line}");
            assert!(line.ends_with(&format!("--resume={before} goes on from it\n")), "{line}");
            let remarks = run(&arguments, &[&format!("--resume={before}")]);
            assert!(remarks.contains("(step 12)"), "{remarks}");
        }
    }
}

#[test]
fn a_folder_that_cannot_be_used() {
    let folder = Folder::new();
    std::fs::write(folder.path("file"), "").unwrap();
    for dir in [folder.argument("file"), folder.argument("file/below")] {
        let line = TRAINER.refuse(&["--checkpoint-dir", &dir]);
        assert!(line.contains(&dir), "{line}");
    }
    let missing = folder.argument("checkpoints/checkpoint-00000009");
    let dir = folder.argument("checkpoints");
    let line = TRAINER.refuse(&["--checkpoint-dir", &dir, &format!("--resume={missing}")]);
    assert!(
        line.contains(&missing) && line.contains("there is no such folder, and no checkpoint in"),
        "{line}"
    );
}
