//! A language model's run that is killed again and again, and goes on in another layout each time; and one that is killed while it writes
//! checkpoints.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sampler::Generator;
use serde_json::Value;
use training::{CheckpointConfig, Checkpoints};

use crate::common::{Folder, Girandole, Session, metrics};

const PRETRAIN: Girandole = Girandole("pretrain");
/// How often, where this variable does not say otherwise.
const KILLS: (&str, usize) = ("GIRANDOLE_FAULT_ROUNDS", 4);
const LAYOUTS: [&str; 8] =
    ["shard=2", "tp=4", "dp=1", "pp=2,dp=2", "tp=2", "pp=2,shard=2", "dp=2", "shard=2,tp=2"];
/// Rows of the text, which are no multiple of a step's.
const ROWS: usize = 36;
/// Of f32: each layout adds in another order, by which the parameters of later steps differ. Ten times what was found in 200 steps, and less
/// than what steps with other rows differ by.
const TOLERANCE: f64 = 1e-5;

/// Rows that all differ, so that the loss of a step tells which it had.
fn rows() -> String {
    let word = |i: usize| ["ash ", "birch ", "cedar ", "elm ", "fir ", "oak\n", "pine "][i * i * i % 31 % 7];
    let text: String = (0..).map(word).take(400).collect();
    text[..ROWS * 16 + 1].into()
}

fn common(folder: &Folder, lines: &str, steps: usize) -> Vec<String> {
    let [data, out] = ["text.txt", "out"].map(|name| folder.argument(name));
    let options = [
        "--overwrite",
        "--data",
        &data,
        "--out",
        &out,
        "--metrics",
        lines,
        "--steps",
        &steps.to_string(),
        "--layers",
        "2",
        "--hidden",
        "32",
        "--heads",
        "4",
        "--length",
        "16",
        "--batch-size",
        "8",
        "--lr",
        "0.003",
    ];
    options.map(String::from).into()
}

fn borrowed(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

/// By step: its number, its epoch, its loss.
fn curve(path: &Path) -> Vec<(u64, u64, f64)> {
    let of = |line: &Value| {
        let number = |name: &str| line[name].as_u64().unwrap();
        (number("batch"), number("epoch"), line["loss"].as_f64().unwrap())
    };
    metrics(path).iter().filter(|line| line["event"] == "step").map(of).collect()
}

/// How many rows the checkpoint that is gone on from says are read, if there is a whole one.
fn saved(folder: &Folder) -> Option<(u64, u64)> {
    let latest = fs::read_to_string(folder.path("checkpoints/latest")).ok()?;
    let json =
        fs::read(folder.path("checkpoints").join(latest.split_once(' ')?.0).join("checkpoint.json")).ok()?;
    let json: Value = serde_json::from_slice(&json).ok()?;
    Some((json["step"].as_u64()?, json["epoch"].as_u64()?))
}

/// What is killed goes on with the rows that come next: were one read twice or left out, the losses would not be those of the run that
/// nobody disturbed, for each step has rows of its own. A kill falls into computing, into writing a checkpoint (there is one after each
/// step, in the background) or into the start; whenever it is, a checkpoint that loads is there.
#[test]
fn a_run_that_is_killed_goes_on_in_other_layouts() {
    let kills = std::env::var(KILLS.0).map_or(KILLS.1, |kills| kills.parse().unwrap());
    // An attempt comes a few steps further; it may as well be killed before the first.
    let steps = 4 * kills + 6;
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), rows()).unwrap();
    let [whole, lines, dir] = ["whole.jsonl", "m.jsonl", "checkpoints"].map(|name| folder.argument(name));
    let arguments = |lines: &str| common(&folder, lines, steps);
    PRETRAIN.succeed(&borrowed(&arguments(&whole)));
    let expected = curve(&folder.path("whole.jsonl"));
    assert_eq!(expected.len(), steps);
    let tells = |pair: &[(u64, u64, f64)]| (pair[0].2 - pair[1].2).abs() > TOLERANCE;
    assert!(expected.windows(2).all(tells), "{expected:?}");
    let mut generator = Generator::new(7);
    let keep = ["--checkpoint-dir", &dir, "--checkpoint-every", "1", "--resume"];
    let (mut killed, mut at) = (0, Vec::new());
    for attempt in 0.. {
        let before = saved(&folder);
        if killed == kills || before.is_some_and(|(step, _)| step as usize + 3 > steps) {
            break;
        }
        assert!(attempt < 4 * kills, "{killed} kills in {attempt} attempts");
        let (own, layout) = (arguments(&lines), LAYOUTS[attempt % LAYOUTS.len()]);
        let mut session =
            Session::start(&PRETRAIN, &[&borrowed(&own)[..], &keep, &["--mesh", layout]].concat());
        // Mostly after a checkpoint, somewhere on the way to the next ones; now and then before.
        let early = generator.next_u32().is_multiple_of(8);
        session.until("a checkpoint", || early || saved(&folder) != before);
        std::thread::sleep(Duration::from_micros(u64::from(generator.next_u32() % 30_000)));
        session.kill(generator.next_u32() as usize);
        killed += 1;
        at.extend(saved(&folder));
    }
    let own = arguments(&lines);
    PRETRAIN.succeed(&[&borrowed(&own)[..], &keep].concat());
    let got = curve(&folder.path("m.jsonl"));
    assert_eq!(got.len(), steps);
    let mut worst = 0f64;
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((got.0, got.1), (expected.0, expected.1));
        worst = worst.max((got.2 - expected.2).abs());
    }
    println!(
        "{killed} kills, {steps} steps, checkpoints gone on from {at:?}; losses differ by {worst:e} at most"
    );
    assert!(worst < TOLERANCE, "{worst}: {got:?}, expected {expected:?}");
    let epochs = steps * 8 / ROWS;
    assert_eq!(saved(&folder).unwrap(), (steps as u64, epochs as u64));
}

/// What a new checkpoint's folder is called before it counts.
fn unfinished(dir: &Path) -> Option<PathBuf> {
    let names = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| path.to_string_lossy().contains("/.unfinished-checkpoint-");
    names.into_iter().find(is_it)
}

/// Whether a new checkpoint's folder has a file, of some bytes.
fn has(dir: &Path, ending: &str) -> bool {
    let entries =
        unfinished(dir).and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let is_it = entry.file_name().to_string_lossy().ends_with(ending);
        is_it && entry.metadata().is_ok_and(|found| found.len() > 0)
    })
}

/// The newest checkpoint's number, whatever `latest` says.
fn newest(dir: &Path) -> Option<PathBuf> {
    Checkpoints::open(CheckpointConfig { dir: dir.into(), keep: 2 }).ok()?.list().ok()?.pop()
}

#[test]
fn a_kill_while_a_checkpoint_is_written_leaves_one_that_loads() {
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), rows()).unwrap();
    let (kept, dir) = (folder.argument("checkpoints"), folder.path("checkpoints"));
    let lines = folder.argument("m.jsonl");
    let own = common(&folder, &lines, 1_000_000);
    let more = ["--checkpoint-dir", &kept, "--checkpoint-every", "2", "--resume", "--mesh", "shard=2"];
    let run = [&borrowed(&own)[..], &more].concat();
    type Moment<'a> = (&'a str, &'a dyn Fn(&Path) -> bool);
    let moments: [Moment<'_>; 4] = [
        ("a folder", &|dir| unfinished(dir).is_some()),
        ("a file of tensors", &|dir| has(dir, ".safetensors")),
        ("a manifest", &|dir| has(dir, ".json")),
        ("a folder under its name", &|_| true),
    ];
    let mut before = None;
    for (place, (what, is_there)) in moments.iter().cycle().take(8).enumerate() {
        let mut session = Session::start(&PRETRAIN, &run);
        // One checkpoint more at least, and then the moment.
        session.until("a checkpoint more", || newest(&dir) > before);
        session.until(what, || is_there(&dir));
        session.kill(1 + place % 2);
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.clone(), keep: 2 }).unwrap();
        let latest = checkpoints.latest().unwrap().unwrap();
        assert!(!latest.files.is_empty());
        latest.files.keys().for_each(|name| latest.check(name).unwrap());
        before = newest(&dir);
    }
    let last = (saved(&folder).unwrap().0 + 2).to_string();
    PRETRAIN.succeed(&[&borrowed(&common(&folder, &lines, last.parse().unwrap()))[..], &more].concat());
    assert_eq!(saved(&folder).unwrap().0.to_string(), last);
}
