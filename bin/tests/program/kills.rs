//! A language-model run that is killed repeatedly and resumed in another layout each time; and one that is killed
//! while it writes checkpoints.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sampler::Generator;
use serde_json::{Value, json};
use training::{CheckpointConfig, Checkpoints};

use crate::common::{Folder, Girandole, Session, metrics};

const PRETRAIN: Girandole = Girandole("pretrain");
/// Environment variable for the number of kills, and its default.
const KILLS: (&str, usize) = ("GIRANDOLE_FAULT_ROUNDS", 4);
const LAYOUTS: [&str; 10] = [
    "shard=2", "tp=4", "dp=1", "pp=2,dp=2", "tp=2", "pp=2,shard=2", "dp=2", "shard=2,tp=2", "cp=2",
    "shard=2,cp=2",
];
/// Layouts of a model with experts.
const EXPERT_LAYOUTS: [&str; 10] = [
    "ep=2", "shard=2,ep=2", "pp=2", "ep=4", "pp=2,ep=2", "dp=1", "ep=2,tp=2", "dp=2,ep=2", "shard=2",
    "cp=2,ep=2",
];
/// Layouts of two groups that train on their own.
const FAR_LAYOUTS: [&str; 6] =
    ["far=2,dp=2", "far=2", "far=2,pp=2", "far=2,tp=2", "far=2,shard=2", "far=2,cp=2"];
/// Rows of the text; not a multiple of the rows per step.
const ROWS: usize = 36;
/// Relative difference of f32 losses: each layout adds in another order, so parameters drift apart. Ten times the
/// largest difference found in 200 steps, and less than the difference between steps with different rows.
const TOLERANCE: f64 = 1e-5;

/// Returns text whose rows all differ, so that the loss of a step identifies its rows.
fn rows() -> String {
    let word = |i: usize| ["ash ", "birch ", "cedar ", "elm ", "fir ", "oak\n", "pine "][i * i * i % 31 % 7];
    let text: String = (0..).map(word).take(400).collect();
    text[..ROWS * 16 + 1].into()
}

fn common(folder: &Folder, lines: &str, steps: usize) -> Vec<String> {
    let size = ["--layers", "2", "--hidden", "32", "--heads", "4"];
    [options(folder, lines, steps), size.map(String::from).to_vec()].concat()
}

/// Options of a model with experts. A token uses all of them: where it has to choose, rounding might decide between two whose scores
/// are almost equal.
fn with_experts(folder: &Folder, lines: &str, steps: usize) -> Vec<String> {
    let config = json!({
        "model_type": "mixtral", "vocab_size": 260, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "num_local_experts": 5,
        "num_experts_per_tok": 5
    });
    fs::create_dir_all(folder.path("base")).unwrap();
    fs::write(folder.path("base/config.json"), config.to_string()).unwrap();
    let model = ["--model", &folder.argument("base"), "--tokenizer", "bytes"].map(String::from).to_vec();
    [options(folder, lines, steps), model].concat()
}

fn options(folder: &Folder, lines: &str, steps: usize) -> Vec<String> {
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

/// Returns step, epoch and loss of each step.
fn curve(path: &Path) -> Vec<(u64, u64, f64)> {
    let of = |line: &Value| {
        let number = |name: &str| line[name].as_u64().unwrap();
        (number("batch"), number("epoch"), line["loss"].as_f64().unwrap())
    };
    metrics(path).iter().filter(|line| line["event"] == "step").map(of).collect()
}

/// Returns step and epoch of the checkpoint that a resume would use, if there is one.
fn saved(folder: &Folder) -> Option<(u64, u64)> {
    let latest = fs::read_to_string(folder.path("checkpoints/latest")).ok()?;
    let json =
        fs::read(folder.path("checkpoints").join(latest.split_once(' ')?.0).join("checkpoint.json")).ok()?;
    let json: Value = serde_json::from_slice(&json).ok()?;
    Some((json["step"].as_u64()?, json["epoch"].as_u64()?))
}

/// `undisturbed` is the layout of a run without kills. A killed run must resume with the next rows: if one were repeated or skipped, the losses would differ from those
/// of an undisturbed run, as each step has different rows. A kill may hit computation, the writing of a checkpoint
/// (after each step, in the background) or startup; a checkpoint that can be loaded must exist at any time.
fn go_on_after_kills(undisturbed: &str, layouts: &[&str], options: fn(&Folder, &str, usize) -> Vec<String>) {
    let kills = std::env::var(KILLS.0).map_or(KILLS.1, |kills| kills.parse().unwrap());
    // An attempt completes a few steps, or is killed before the first one.
    let steps = 4 * kills + 6;
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), rows()).unwrap();
    let [whole, lines, dir] = ["whole.jsonl", "m.jsonl", "checkpoints"].map(|name| folder.argument(name));
    let arguments = |lines: &str| options(&folder, lines, steps);
    let mesh = ["--mesh", undisturbed];
    PRETRAIN.succeed(&[&borrowed(&arguments(&whole))[..], &mesh].concat());
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
        let (own, layout) = (arguments(&lines), layouts[attempt % layouts.len()]);
        let mut session =
            Session::start(&PRETRAIN, &[&borrowed(&own)[..], &keep, &["--mesh", layout]].concat());
        // Usually after another checkpoint, on the way to the next ones; sometimes earlier.
        let early = generator.next_u32().is_multiple_of(8);
        session.until("a checkpoint", || early || saved(&folder) != before);
        std::thread::sleep(Duration::from_micros(u64::from(generator.next_u32() % 30_000)));
        session.kill(generator.next_u32() as usize);
        killed += 1;
        at.extend(saved(&folder));
    }
    let own = arguments(&lines);
    PRETRAIN.succeed(&[&borrowed(&own)[..], &keep, &mesh].concat());
    let got = curve(&folder.path("m.jsonl"));
    assert_eq!(got.len(), steps);
    let mut worst = 0f64;
    for (got, expected) in got.iter().zip(&expected) {
        assert_eq!((got.0, got.1), (expected.0, expected.1));
        worst = worst.max((got.2 - expected.2).abs());
    }
    assert!(
        worst < TOLERANCE,
        "{worst} after {killed} kills, gone on from {at:?}: {got:?}, expected {expected:?}"
    );
    let epochs = steps * 8 / ROWS;
    assert_eq!(saved(&folder).unwrap(), (steps as u64, epochs as u64));
}

#[test]
fn a_run_that_is_killed_goes_on_in_other_layouts() {
    go_on_after_kills("dp=1", &LAYOUTS, common);
}

#[test]
fn a_run_with_experts_that_is_killed_goes_on_in_other_layouts() {
    go_on_after_kills("dp=1", &EXPERT_LAYOUTS, with_experts);
}

/// Each group has its own parameters and state between two averages, and after every third step its changes are on their way.
#[test]
fn groups_that_are_killed_go_on_in_other_layouts() {
    go_on_after_kills("far=2", &FAR_LAYOUTS, |folder, lines, steps| {
        [common(folder, lines, steps), ["--far-every", "3", "--far-delay", "1"].map(String::from).to_vec()]
            .concat()
    });
}

/// Returns the folder of a checkpoint that is still being written.
fn unfinished(dir: &Path) -> Option<PathBuf> {
    let names = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path());
    let is_it = |path: &PathBuf| path.to_string_lossy().contains("/.unfinished-checkpoint-");
    names.into_iter().find(is_it)
}

/// Whether the folder of an unfinished checkpoint has a non-empty file with this ending.
fn has(dir: &Path, ending: &str) -> bool {
    let entries =
        unfinished(dir).and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let is_it = entry.file_name().to_string_lossy().ends_with(ending);
        is_it && entry.metadata().is_ok_and(|found| found.len() > 0)
    })
}

/// Returns the folder of the newest checkpoint, whatever `latest` names.
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
        // After at least one more checkpoint, at the chosen moment.
        session.until("a checkpoint more", || newest(&dir) > before);
        session.until(what, || is_there(&dir));
        session.kill(1 + place % 2);
        let checkpoints = Checkpoints::open(CheckpointConfig { dir: dir.clone(), keep: 2 }).unwrap();
        let latest = checkpoints.latest().unwrap().unwrap();
        assert!(!latest.files.is_empty());
        latest.check_all().unwrap();
        before = newest(&dir);
    }
    let last = (saved(&folder).unwrap().0 + 2).to_string();
    PRETRAIN.succeed(&[&borrowed(&common(&folder, &lines, last.parse().unwrap()))[..], &more].concat());
    assert_eq!(saved(&folder).unwrap().0.to_string(), last);
}
