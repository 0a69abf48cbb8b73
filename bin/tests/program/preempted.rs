//! Runs that are asked to stop, as when a job is preempted: they write a checkpoint, say so by their exit code, and end
//! with the same bits as an undisturbed run when they go on.

use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal};
use sampler::Generator;
use serde_json::Value;

use crate::common::{Folder, Girandole, Session, is_ignored, metrics, text};

/// Environment variable for the number of stops of each run, and its default.
const STOPS: (&str, usize) = ("GIRANDOLE_FAULT_ROUNDS", 3);
/// Exit code of a run that was stopped with a checkpoint.
const CHECKPOINTED: i32 = 85;

/// A run that can be stopped, with its options, and the option that limits it.
struct Case {
    command: &'static str,
    options: &'static [&'static str],
    limit: &'static str,
}

const fn epochs(command: &'static str, options: &'static [&'static str]) -> Case {
    Case { command, options, limit: "--epochs" }
}

const fn steps(command: &'static str, options: &'static [&'static str]) -> Case {
    Case { command, options, limit: "--steps" }
}

/// Every kind of layout of the documents' trainer.
const DOCUMENTS: [Case; 7] = [
    epochs("ddp-transformer", &["--world-size", "2", "--samples", "20", "--reshuffle"]),
    epochs("ddp-trainer", &["--world-size", "3", "--samples", "40", "--batch-size", "2", "--lr", "0.01"]),
    epochs("ddp-transformer", &["--elastic", "1:2", "--samples", "20"]),
    steps("fsdp-mlp", &["--world-size", "3", "--features", "24", "--hidden", "50"]),
    epochs(
        "tensor-parallel-mlp",
        &["--tp", "2", "--dp", "2", "--hidden-size", "16", "--samples", "40", "--batch-size", "8"],
    ),
    epochs("pipeline-transformer", &["--world-size", "2", "--samples", "20"]),
    epochs(
        "pipeline-transformer",
        &["--world-size", "4", "--dp", "2", "--schedule", "zb-v", "--batch-size", "2", "--samples", "20"],
    ),
];

/// A small language model; half of the runs evaluate after every few steps, so that some stops hit an evaluation.
const SMALL: [&str; 10] =
    ["--layers", "2", "--hidden", "32", "--heads", "4", "--length", "16", "--batch-size", "8"];
const LAYOUTS: [&[&str]; 8] = [
    &["--mesh", "dp=2"],
    &["--mesh", "shard=2", "--evaluate-every", "3"],
    &["--mesh", "tp=2"],
    &["--mesh", "pp=2", "--evaluate-every", "3"],
    &["--mesh", "pp=2,dp=2"],
    &["--mesh", "far=2,dp=2", "--far-every", "2"],
    &["--mesh", "shard=2,tp=2"],
    &["--elastic", "1:2", "--evaluate-every", "3"],
];

fn stops() -> usize {
    std::env::var(STOPS.0).map_or(STOPS.1, |stops| stops.parse().unwrap())
}

/// Returns the manifest of the latest checkpoint.
fn latest(dir: &Path) -> Option<Value> {
    let latest = std::fs::read_to_string(dir.join("latest")).ok()?;
    let json = std::fs::read(dir.join(latest.split_once(' ')?.0).join("checkpoint.json")).ok()?;
    serde_json::from_slice(&json).ok()
}

/// Returns the losses of all steps, in order.
fn losses(path: &Path) -> Vec<(u64, u64, f64)> {
    let of = |line: &Value| {
        let number = |name: &str| line[name].as_u64().unwrap();
        (number("epoch"), number("batch"), line["loss"].as_f64().unwrap())
    };
    metrics(path).iter().filter(|line| line["event"] == "step").map(of).collect()
}

/// Starts a run, stops it at a random moment after its first checkpoint, and checks how it ends.
fn stop_once(
    command: &Girandole,
    options: &[&str],
    dir: &Path,
    random: &mut Generator,
    signal: impl Fn(&Session) -> (Pid, Signal),
) {
    let mut session = Session::start(command, options);
    let before = std::fs::read(dir.join("latest")).ok();
    session.until("a checkpoint more", || std::fs::read(dir.join("latest")).ok() != before);
    std::thread::sleep(Duration::from_micros(u64::from(random.next_u32() % 20_000)));
    let (to, signal) = signal(&session);
    rustix::process::kill_process(to, signal).unwrap();
    let output = session.end();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(CHECKPOINTED), "{options:?}: {} {said}", output.status);
    let step = latest(dir).unwrap()["step"].as_u64().unwrap();
    let name = if signal == Signal::TERM { "SIGTERM" } else { "SIGUSR1" };
    let folder = dir.display();
    let line = format!(
        "note: stopped by {name} after step {step}; --resume goes on from there (checkpoints in {folder})"
    );
    assert_eq!(said.lines().last(), Some(line.as_str()), "{said}");
    assert!(!said.contains("error: "), "{said}");
}

/// Stops a run several times, resumes it each time, and compares the result with that of an undisturbed run. `save` is
/// the option that makes it write its weights, and `saved` the file below that option's path.
fn stop_and_resume(command: &Girandole, options: &[&str], limit: &str, (save, saved): (&str, &str)) {
    if is_ignored(15) {
        return eprintln!("SIGTERM is ignored here: nothing to test");
    }
    let folder = Folder::new();
    let [dir, lines, whole_lines] = ["ck", "m.jsonl", "whole.jsonl"].map(|name| folder.argument(name));
    let [stopped, whole] = ["stopped", "whole"].map(|name| folder.argument(name));
    let keep = ["--checkpoint-dir", &dir, "--checkpoint-every", "7", "--resume", "--metrics", &lines];
    let run = [options, &keep, &[save, &stopped]].concat();
    let mut random = Generator::new(run.len() as u64);
    for stop in 0..stops() {
        // So many that it cannot end by itself. Another end changes the learning rates of a language model.
        let endless = [&run[..], &[limit, "1000000", "--stop-on", "USR1"]].concat();
        stop_once(command, &endless, &folder.path("ck"), &mut random, |session| match stop % 3 {
            0 => (session.launcher(), Signal::TERM),
            1 => (session.launcher(), Signal::USR1),
            // One rank alone; of an elastic run it would leave, and the other would go on with other sums.
            _ if options.contains(&"--elastic") => (session.launcher(), Signal::TERM),
            _ => (session.ranks()[stop % session.ranks().len()], Signal::TERM),
        });
    }
    let kept = latest(&folder.path("ck")).unwrap();
    let end = match limit {
        "--epochs" => kept["epoch"].as_u64().unwrap() + 2,
        _ => kept["step"].as_u64().unwrap() + 5,
    };
    let end = end.to_string();
    command.succeed(&[&run[..], &[limit, &end]].concat());
    command.succeed(&[options, &[limit, &end, save, &whole, "--metrics", &whole_lines]].concat());
    let read = |path: &str| std::fs::read(format!("{path}{saved}")).unwrap();
    assert!(read(&stopped) == read(&whole), "{options:?}: other weights after {limit} {end}");
    let [got, expected] = ["m.jsonl", "whole.jsonl"].map(|name| losses(&folder.path(name)));
    assert_eq!(got, expected, "{options:?}");
}

#[test]
fn the_documents_go_on_with_the_same_bits() {
    for Case { command, options, limit } in DOCUMENTS {
        stop_and_resume(&Girandole(command), options, limit, ("--save", ""));
    }
}

#[test]
fn language_models_go_on_with_the_same_bits_in_every_layout() {
    let folder = Folder::new();
    let words = ["ash ", "birch ", "cedar ", "elm ", "fir ", "oak\n", "pine "];
    let written: String = (0..400).map(|i: usize| words[i * i * i % 31 % 7]).collect();
    std::fs::write(folder.path("text.txt"), written).unwrap();
    let data = folder.argument("text.txt");
    for layout in LAYOUTS {
        let evaluated = if layout.contains(&"--evaluate-every") { &["--evaluate", &*data][..] } else { &[] };
        let more = ["--data", &data, "--overwrite", "--schedule", "constant"];
        let options = [&more[..], &SMALL, layout, evaluated].concat();
        stop_and_resume(&Girandole("pretrain"), &options, "--steps", ("--out", "/model.safetensors"));
    }
}

/// Without a folder for checkpoints a signal ends the run, and before the first step there is nothing to keep.
#[test]
fn without_checkpoints_it_ends_as_ever() {
    if is_ignored(15) {
        return eprintln!("SIGTERM is ignored here: nothing to test");
    }
    let folder = Folder::new();
    let lines = folder.argument("m.jsonl");
    let options = ["--epochs", "1000000", "--world-size", "2", "--metrics", &lines];
    let mut session = Session::start(&Girandole("ddp-transformer"), &options);
    session.until("steps", || std::fs::metadata(&lines).is_ok_and(|file| file.len() > 0));
    rustix::process::kill_process(session.launcher(), Signal::TERM).unwrap();
    let output = session.end();
    assert_eq!(output.status.code(), Some(128 + 15), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(said.ends_with("\nerror: stopped by SIGTERM; all ranks have ended\n"), "{said}");
}

/// Neither does a launcher take it for a failure that is worth a restart.
#[test]
fn a_launcher_passes_the_code_on_and_restarts_nothing() {
    if is_ignored(15) {
        return eprintln!("SIGTERM is ignored here: nothing to test");
    }
    for to_rank in [false, true] {
        let folder = Folder::new();
        let dir = folder.argument("ck");
        let launch = ["--nproc-per-node", "2", "--max-restarts", "3", "--", env!("CARGO_BIN_EXE_girandole")];
        let train =
            ["ddp-transformer", "--epochs", "1000000", "--checkpoint-dir", &dir, "--checkpoint-every", "5"];
        let options = [&launch[..], &train].concat();
        stop_once(&Girandole("launch"), &options, &folder.path("ck"), &mut Generator::new(1), |session| {
            match to_rank {
                true => (session.ranks()[1], Signal::TERM),
                false => (session.launcher(), Signal::TERM),
            }
        });
    }
}
