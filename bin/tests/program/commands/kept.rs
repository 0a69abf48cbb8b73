//! Damaged checkpoints, and the reported time of resumed runs.

use std::path::Path;
#[cfg(unix)]
use std::process::Command;

use serde_json::Value;

#[cfg(unix)]
use crate::commands::inputs::within_minutes;
use crate::common::{Folder, girandole, metrics, refuse_with, succeed, text};

/// Every command with checkpoints, and the option for the length of training.
const TRAINED: [(&str, &[&str], &str); 8] = [
    ("ddp-trainer", &["--samples", "20", "--batch-size", "4"], "--epochs"),
    ("ddp-transformer", &["--samples", "4"], "--epochs"),
    ("ddp-mlp", &["--validation-samples", "4"], "--epochs"),
    ("cifar10", &["--samples", "16", "--test-samples", "4"], "--epochs"),
    ("fsdp-mlp", &["--features", "24", "--hidden", "50", "--checkpoint-every", "1"], "--steps"),
    ("tensor-parallel-mlp", &["--hidden-size", "16", "--samples", "16", "--batch-size", "4"], "--epochs"),
    ("tensor-parallel-transformer", &["--d-model", "16", "--samples", "8", "--length", "9"], "--epochs"),
    ("pipeline-transformer", &["--samples", "8"], "--epochs"),
];

/// Returns the arguments of a command with checkpoints in a folder; `long` is the number of epochs or steps.
fn run<'a>(at: usize, dir: &'a str, long: &'a str) -> Vec<&'a str> {
    let (command, options, length) = TRAINED[at];
    [&[command], options, &["--world-size", "2", "--checkpoint-dir", dir, length, long]].concat()
}

#[test]
fn a_damaged_file_is_named_before_any_rank_is_started() {
    for at in 0..TRAINED.len() {
        let folder = Folder::new();
        let dir = folder.argument("c");
        succeed(girandole().args(run(at, &dir, "2")));
        for file in files(&Path::new(&dir).join("checkpoint-00000002")) {
            let whole = damage(&file);
            let (line, code) = refuse_with(girandole().args(run(at, &dir, "3")), &["--resume"]);
            let begin = format!("error: `{}` cannot be trusted: ", file.display());
            let end = format!("--resume={dir}/checkpoint-00000001 goes on from it\n");
            assert!(line.starts_with(&begin) && line.ends_with(&end) && code == 2, "{code}: {line}");
            std::fs::write(&file, whole).unwrap();
        }
    }
}

/// Also where another launcher starts the ranks: then the first rank checks before it lets the others begin.
#[test]
fn a_damaged_part_of_a_language_model_is_named_before_any_rank_trains() {
    let folder = Folder::new();
    let [dir, data, out] = ["c", "text", "out"].map(|name| folder.argument(name));
    std::fs::write(&data, "a text of some words\n".repeat(50)).unwrap();
    let size = ["--layers", "1", "--hidden", "16", "--heads", "2", "--length", "16", "--world-size", "2"];
    let paths = ["pretrain", "--data", &data, "--out", &out, "--checkpoint-dir", &dir];
    let run = [&paths[..], &size, &["--mesh", "shard=2", "--checkpoint-every", "1", "--steps"]].concat();
    succeed(girandole().args(&run).arg("2"));
    let damaged = files(&Path::new(&dir).join("checkpoint-00000002"));
    assert_eq!(damaged.len(), 4, "{damaged:?}");
    for file in damaged {
        let whole = damage(&file);
        let (line, code) = refuse_with(girandole().args(&run).args(["3", "--resume"]), &[]);
        let said = format!("`{}` cannot be trusted: ", file.display());
        let end = format!("--resume={dir}/checkpoint-00000001 goes on from it\n");
        assert!(line.starts_with(&format!("error: {said}")) && line.ends_with(&end) && code == 2, "{line}");
        let launched = ["launch", "--nproc-per-node", "2", "--"];
        let mut command = girandole();
        command.args(launched).arg(girandole().get_program()).args(&run).args(["3", "--resume"]);
        let output = command.output().unwrap();
        assert!(text(&output.stderr).contains(&format!("rank 0: error: {said}")), "{output:?}");
        assert!(!output.status.success() && output.stdout.is_empty(), "{output:?}");
        std::fs::write(&file, whole).unwrap();
    }
}

/// What the error calls the replacement, and how it is made.
#[cfg(unix)]
type Replace = (&'static str, fn(&Path));

/// A file is replaced by something that is no regular file, or by a broken link: damage that a retry does not fix.
#[cfg(unix)]
#[test]
fn what_is_in_the_place_of_a_file_is_named_before_any_rank_is_started() {
    use std::os::unix::fs::symlink;

    let replace: [Replace; 4] = [
        ("it is a folder", |path| std::fs::create_dir(path).unwrap()),
        ("it is a pipe", |path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success())),
        ("it is a device", |path| symlink("/dev/zero", path).unwrap()),
        ("it is a link that leads back to itself", |path| symlink(path, path).unwrap()),
    ];
    for at in [0, 4, 5, 7] {
        let folder = Folder::new();
        let dir = folder.argument("c");
        succeed(girandole().args(run(at, &dir, "2")));
        let mut all = files(&Path::new(&dir).join("checkpoint-00000002"));
        all.push(folder.path("c/latest"));
        for file in all {
            for (problem, replace) in replace {
                let aside = folder.path("aside");
                std::fs::rename(&file, &aside).unwrap();
                replace(&file);
                let (line, code) = refuse_with(within_minutes().args(run(at, &dir, "3")), &["--resume"]);
                let begin = format!("error: `{}` cannot be trusted: {problem}", file.display());
                // If the file that names the latest checkpoint is damaged, that checkpoint itself is not.
                let whole =
                    if file.ends_with("latest") { "checkpoint-00000002" } else { "checkpoint-00000001" };
                let end = format!("--resume={dir}/{whole} goes on from it\n");
                assert!(line.starts_with(&begin) && line.ends_with(&end) && code == 2, "{code}: {line}");
                // `rename` does not replace a folder, so it is removed; for the others this fails and is not needed.
                let _ = std::fs::remove_dir(&file);
                std::fs::rename(&aside, &file).unwrap();
            }
        }
    }
}

#[test]
fn a_checkpoint_of_another_command_is_refused_with_both_names() {
    for (at, other) in [(0, 1), (0, 4), (4, 0), (4, 5), (5, 6), (7, 2), (1, 7)] {
        let folder = Folder::new();
        let dir = folder.argument("c");
        succeed(girandole().args(run(at, &dir, "1")));
        let (line, code) = refuse_with(girandole().args(run(other, &dir, "2")), &["--resume"]);
        let [was, is] = [at, other].map(|at| TRAINED[at].0);
        let help = format!("that is of the command {was}, and this is {is}\n");
        assert_eq!((line, code), (format!("error: --checkpoint-dir: got {dir}; {help}"), 2));
        let (one, new) = (format!("{dir}/checkpoint-00000001"), folder.argument("new"));
        let (line, code) = refuse_with(girandole().args(run(other, &new, "2")), &["--resume", &one]);
        assert_eq!((line, code), (format!("error: --resume: got {one}; {help}"), 2));
    }
}

#[test]
fn the_folder_of_checkpoints_is_none_itself() {
    for at in [0, 4] {
        let folder = Folder::new();
        let (dir, new) = (folder.argument("c"), folder.argument("new"));
        succeed(girandole().args(run(at, &dir, "2")));
        for into in [&dir, &new] {
            let (line, code) = refuse_with(girandole().args(run(at, into, "3")), &["--resume", &dir]);
            let help = "this folder holds checkpoints but is not a checkpoint: give one of them, such as";
            let expected = format!("error: --resume: got {dir}; {help} {dir}/checkpoint-00000002; ");
            assert!(line.starts_with(&expected) && code == 2, "{code}: {line}");
        }
    }
}

#[test]
fn a_checkpoint_that_is_further_or_began_otherwise_is_refused() {
    for (at, (command, _, length)) in TRAINED.into_iter().enumerate() {
        let folder = Folder::new();
        let [dir, weights] = ["c", "w"].map(|name| folder.argument(name));
        succeed(girandole().args(run(at, &dir, "2")).args(["--save", &weights]));
        let refused = |long: &str, more: &[&str]| {
            let (line, code) = refuse_with(girandole().args(run(at, &dir, long)), more);
            assert_eq!(code, 2, "{command}: {line}");
            line
        };
        let before = std::fs::read(&weights).unwrap();
        let line = refused("1", &["--resume", "--save", &weights]);
        assert!(
            line.starts_with(&format!("error: {length}: got 1; the checkpoint in {dir} is at ")),
            "{line}"
        );
        assert!(line.contains(if length == "--steps" {
            "step 2 already"
        } else {
            "epoch 2, batch 0 (step "
        }));
        assert!(std::fs::read(&weights).unwrap() == before);
        let line = refused("3", &["--resume", "--init", &weights]);
        assert!(line.starts_with("error: --init: got a file with SHA-256 "), "{line}");
        assert!(line.contains("began with random weights"), "{line}");
    }
}

#[test]
fn a_launched_job_with_damaged_losses_is_not_tried_again() {
    for at in 0..TRAINED.len() {
        for damage in [
            |path: &Path| std::fs::remove_file(path),
            |path: &Path| {
                let mut bytes = std::fs::read(path)?;
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(path, bytes)
            },
        ] {
            let folder = Folder::new();
            let dir = folder.argument("c");
            succeed(girandole().args(run(at, &dir, "2")));
            let file = Path::new(&dir).join("checkpoint-00000002/observer.safetensors");
            damage(&file).unwrap();
            let launch = ["launch", "--nproc-per-node", "2", "--max-restarts", "2", "--"];
            let mut command = girandole();
            command.args(launch).arg(env!("CARGO_BIN_EXE_girandole")).args(run(at, &dir, "3"));
            let output = command.arg("--resume").output().unwrap();
            let said = text(&output.stderr);
            let told = format!("`{}` cannot be trusted: ", file.display());
            let last = said.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
            assert!(last.contains(&told), "{said}");
            assert!(last.ends_with(&format!("--resume={dir}/checkpoint-00000001 goes on from it")), "{said}");
            assert_eq!(output.status.code(), Some(2), "{said}");
            assert!(!said.contains("start again"), "{said}");
        }
    }
}

#[test]
fn the_time_of_a_run_that_goes_on_is_that_of_all_its_parts() {
    for at in 0..TRAINED.len() {
        let folder = Folder::new();
        let (dir, lines) = (folder.argument("c"), folder.argument("m.jsonl"));
        succeed(girandole().args(run(at, &dir, "2")));
        let manifest = std::fs::read(folder.path("c/checkpoint-00000002/checkpoint.json")).unwrap();
        let kept = seconds(&serde_json::from_slice(&manifest).unwrap()).unwrap();
        // No steps are left.
        succeed(girandole().args(run(at, &dir, "2")).args(["--resume", "--metrics", &lines]));
        let summary = metrics(lines.as_ref()).pop().unwrap();
        assert_eq!(summary["event"], "summary");
        assert!(kept > 0.0 && summary["seconds"].as_f64().unwrap() >= kept, "{summary}, after {kept} s");
    }
}

/// Returns the seconds in a checkpoint's log, wherever it is nested in the manifest.
fn seconds(manifest: &Value) -> Option<f64> {
    let map = manifest.as_object()?;
    let own = map.get("log").and_then(|log| log["seconds"].as_u64()).map(f64::from_bits);
    own.or_else(|| map.values().find_map(seconds))
}

/// Changes one bit in the middle of a file, and returns what it held.
fn damage(file: &Path) -> Vec<u8> {
    let whole = std::fs::read(file).unwrap();
    let mut bytes = whole.clone();
    bytes[whole.len() / 2] ^= 1;
    std::fs::write(file, bytes).unwrap();
    whole
}

fn files(folder: &Path) -> Vec<std::path::PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}
