//! `--tensorboard`: event files, checked with an independent reader.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::common::{Folder, Girandole, metrics};

const PRETRAIN: Girandole = Girandole("pretrain");

const SMALL: [&str; 12] = [
    "--layers", "1", "--hidden", "16", "--heads", "2", "--length", "16", "--batch-size", "4", "--lr", "0.01",
];

/// Computes CRC-32C bit by bit, with TFRecord's mask.
fn masked_crc(bytes: &[u8]) -> u32 {
    let mut crc = u32::MAX;
    for byte in bytes {
        crc ^= u32::from(*byte);
        (0..8).for_each(|_| crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 });
    }
    let crc = !crc;
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Reads all records of a file.
fn records(path: &Path) -> Vec<Vec<u8>> {
    let bytes = fs::read(path).unwrap();
    let (mut rest, mut records) = (&bytes[..], Vec::new());
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(number(&rest[8..12]), masked_crc(&rest[..8]));
        let record = &rest[12..12 + length];
        assert_eq!(number(&rest[12 + length..16 + length]), masked_crc(record));
        records.push(record.to_vec());
        rest = &rest[16 + length..];
    }
    records
}

/// A field's number, and its value: a number, or bytes.
type Field = (u64, u64, Vec<u8>);

fn fields(mut bytes: &[u8]) -> Vec<Field> {
    let varint = |bytes: &mut &[u8]| {
        let end = bytes.iter().position(|byte| byte & 0x80 == 0).unwrap();
        let number = bytes[..=end].iter().rev().fold(0, |all, byte| all << 7 | u64::from(byte & 0x7f));
        *bytes = &bytes[end + 1..];
        number
    };
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let taken = match key & 7 {
            0 => {
                let number = varint(&mut bytes);
                fields.push((key >> 3, number, Vec::new()));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes) as usize,
            5 => 4,
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, 0, bytes[..taken].to_vec()));
        bytes = &bytes[taken..];
    }
    fields
}

/// Content of a file: the first step of its run, and the values of its steps by tag.
pub(crate) struct Events {
    pub(crate) begin: u64,
    pub(crate) values: BTreeMap<String, Vec<(u64, f32)>>,
}

pub(crate) fn read(path: &Path) -> Events {
    let mut events = Events { begin: 0, values: BTreeMap::new() };
    for (place, record) in records(path).into_iter().enumerate() {
        let fields = fields(&record);
        let of = |field: u64| fields.iter().find(|(number, ..)| *number == field);
        let time = f64::from_le_bytes(of(1).unwrap().2[..].try_into().unwrap());
        assert!(time > 1.6e9 && time < 1e11, "{time}");
        let step = of(2).unwrap().1;
        match place {
            0 => assert_eq!(of(3).unwrap().2, b"brain.Event:2"),
            1 => {
                assert_eq!(self::fields(&of(7).unwrap().2), [(1, 1, Vec::new())]);
                events.begin = step;
            }
            _ => {
                for (field, _, value) in self::fields(&of(5).unwrap().2) {
                    let value = self::fields(&value);
                    assert_eq!((field, value[0].0, value[1].0, value.len()), (1, 1, 2, 2));
                    let tag = String::from_utf8(value[0].2.clone()).unwrap();
                    let number = f32::from_le_bytes(value[1].2[..].try_into().unwrap());
                    events.values.entry(tag).or_default().push((step, number));
                }
            }
        }
    }
    events
}

/// Returns the event files of a folder, the oldest first.
pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.sort();
    all
}

fn steps(lines: &[Value]) -> Vec<&Value> {
    lines.iter().filter(|line| line["event"] == "step").collect()
}

/// Names of the same quantity in events and in metrics.
const PAIRS: [(&str, &str); 10] = [
    ("train/loss", "loss"),
    ("train/learning_rate", "learning_rate"),
    ("train/gradient_norm", "grad_norm"),
    ("speed/tokens_per_second", "tokens_per_second"),
    ("speed/model_flops_per_second", "model_flops_per_second"),
    ("speed/mfu", "mfu"),
    ("speed/compute_seconds", "compute_seconds"),
    ("speed/communication_seconds", "communication_seconds"),
    ("speed/waiting_seconds", "waiting_seconds"),
    ("memory/peak_rss_bytes", "peak_rss_bytes"),
];

/// Checks that each step's times add up.
fn assert_times(lines: &[Value]) {
    for line in steps(lines) {
        let number = |name: &str| line[name].as_f64().unwrap();
        assert!(number("mfu") > 0.0 && number("model_flops_per_second") > 0.0, "{line}");
        let (all, both) = (number("seconds"), number("compute_seconds") + number("communication_seconds"));
        assert!(both >= 0.999 * all && number("communication_seconds") > 0.0, "{line}");
        assert!((0.0..=number("communication_seconds")).contains(&number("waiting_seconds")), "{line}");
    }
}

#[test]
fn event_files_have_what_the_metrics_have_and_a_resumed_run_appends() {
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), "one two three four\n".repeat(60)).unwrap();
    let [data, out, lines, events, kept] =
        ["text.txt", "out", "m.jsonl", "events", "kept"].map(|name| folder.argument(name));
    let common = [
        "--data", &data, "--out", &out, "--metrics", &lines, "--tensorboard", &events, "--checkpoint-dir",
        &kept, "--checkpoint-every", "2", "--evaluate", &data, "--evaluate-every", "2",
    ];
    let run = |options: &[&str]| PRETRAIN.succeed(&[&common[..], &SMALL, options].concat());
    run(&["--steps", "5", "--mesh", "shard=2"]);
    let first = read(&files(&folder.path("events"))[0]);
    assert_eq!(first.begin, 1);
    let all = metrics(&folder.path("m.jsonl"));
    for (tag, name) in PAIRS {
        let expected: Vec<(u64, f32)> = steps(&all)
            .iter()
            .map(|line| (line["batch"].as_u64().unwrap() + 1, line[name].as_f64().unwrap() as f32))
            .collect();
        assert_eq!(expected.len(), 5);
        assert_eq!(first.values[tag], expected, "{tag}");
    }
    assert_times(&all);
    let evaluated: Vec<u64> = first.values["evaluation/loss"].iter().map(|(step, _)| *step).collect();
    assert_eq!(evaluated, [2, 4, 5]);
    assert_eq!(first.values.len(), PAIRS.len() + 1);
    let checkpoints = &all.last().unwrap()["checkpoints"];
    assert_eq!(checkpoints["count"], 3);
    assert!(
        checkpoints["stood_still_seconds"].as_f64().is_some()
            && checkpoints["at_end_seconds"].as_f64().is_some()
    );
    // Resumes after the fourth step: both files have the fifth, and the second one invalidates that of the first.
    let fourth = folder.argument("kept/checkpoint-00000002");
    run(&["--steps", "7", "--mesh", "tp=2", "--resume", &fourth]);
    let both = files(&folder.path("events"));
    assert_eq!(both.len(), 2);
    let second = read(&both[1]);
    let taken: Vec<u64> = second.values["train/loss"].iter().map(|(step, _)| *step).collect();
    assert_eq!((second.begin, taken), (5, vec![5, 6, 7]));
    assert_eq!(read(&both[0]).values, first.values);
}

#[test]
fn a_folder_that_cannot_be_written_is_told_before_ranks_start() {
    let folder = Folder::new();
    fs::write(folder.path("text.txt"), "one two three four\n".repeat(60)).unwrap();
    fs::write(folder.path("file"), "").unwrap();
    let [data, out] = ["text.txt", "out"].map(|name| folder.argument(name));
    for (dir, says) in [("file", "it is a file: give a folder"), ("file/below", "")] {
        let dir = folder.argument(dir);
        let options =
            ["--data", &data, "--out", &out, "--steps", "1", "--mesh", "dp=2", "--tensorboard", &dir];
        let said = PRETRAIN.refuse(&[&options[..], &SMALL].concat());
        assert!(said.contains(&format!("cannot write {dir}: ")) && said.contains(says), "{said}");
    }
}
