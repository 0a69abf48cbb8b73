//! The first rank of an elastic job is lost after training, while it writes the result and the others wait for it.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Output, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Signal, kill_process};

use crate::common::{Folder, girandole, metrics, text};
use crate::launch::elastic::rank_of;
use crate::launch::nodes::Nodes;

/// Starts a job of three ranks that writes the output of this option into a pipe, and its metrics to `m.jsonl`.
fn start(folder: &Folder, train: &[&str], output: &str) -> Nodes {
    let pipe = folder.argument("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", "3", "--elastic", "1:3", "--", "girandole"]).args(train);
    command.args([output, &pipe, "--metrics", &folder.argument("m.jsonl")]);
    Nodes(vec![command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()])
}

/// Returns the arguments of two commands, and the beginning of the last line that they print.
fn commands(folder: &Folder) -> [(Vec<String>, &'static str); 2] {
    fs::write(folder.path("text.txt"), "one two three four\n".repeat(100)).unwrap();
    let (data, out) = (folder.argument("text.txt"), folder.argument("out"));
    let small = "--layers 1 --hidden 16 --heads 2 --length 8 --batch-size 12 --steps 20 --overwrite";
    let pretrain = ["pretrain", "--data", &data, "--out", &out].into_iter().chain(small.split(' '));
    let mlp = ["ddp-mlp", "--epochs", "40"].map(String::from).into();
    [(mlp, "Validation, "), (pretrain.map(String::from).collect(), "saved in ")]
}

fn borrowed(all: &[String]) -> Vec<&str> {
    all.iter().map(String::as_str).collect()
}

/// Waits for the job; returns its output, and what was written into the pipe until `last`.
fn end(job: Nodes, mut pipe: File, last: &'static [u8]) -> (Output, String) {
    let mut own = pipe.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let (mut written, mut chunk) = (Vec::new(), [0; 4096]);
        while !written.ends_with(last) {
            let len = pipe.read(&mut chunk).unwrap();
            written.extend(&chunk[..len]);
        }
        String::from_utf8(written).unwrap()
    });
    let output = job.end().remove(0);
    // Ends the reader if no rank has done so.
    own.write_all(last).unwrap();
    (output, reader.join().unwrap())
}

/// Opens the pipe such that ranks find a reader, and that a rank that is lost does not end it.
fn open(folder: &Folder) -> File {
    File::options().read(true).write(true).open(folder.path("pipe")).unwrap()
}

/// Waits until a rank writes, and fails if none does.
fn wait_for_bytes(pipe: &File) {
    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::new(pipe, PollFlags::IN)], Some(&limit)).unwrap();
    assert_eq!(ready, 1, "no rank writes into the pipe");
}

#[test]
fn another_rank_writes_the_trace_and_the_result_if_the_first_one_has_not() {
    let place = Folder::new();
    for (train, last) in commands(&place) {
        let folder = Folder::new();
        let job = start(&folder, &borrowed(&train), "--trace");
        let pipe = open(&folder);
        wait_for_bytes(&pipe);
        // The trace is longer than what a pipe holds, so this rank is still writing it.
        kill_process(rank_of(&job.0[0], 0).unwrap(), Signal::KILL).unwrap();
        let (output, written) = end(job, pipe, b"\n]}\n");
        let remarks = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{remarks}");
        let (_, trace) = written.rsplit_once("{\"displayTimeUnit\"").unwrap();
        assert!(!trace.contains("rank 0 (") && trace.contains("rank 1 (") && trace.contains("rank 2 ("));
        let printed = text(&output.stdout);
        assert_eq!(printed.lines().filter(|line| line.starts_with(last)).count(), 1, "{printed}{remarks}");
        let lines = metrics(&folder.path("m.jsonl"));
        assert_eq!(lines.iter().filter(|line| line["event"] == "summary").count(), 1, "{remarks}");
    }
}

#[test]
fn another_rank_writes_the_report_if_the_first_one_has_not() {
    let place = Folder::new();
    for (train, last) in commands(&place) {
        let folder = Folder::new();
        let mut job = start(&folder, &borrowed(&train), "--report");
        let mut lines = BufReader::new(job.0[0].stdout.take().unwrap()).lines();
        lines.by_ref().find(|line| line.as_ref().unwrap().starts_with(last)).unwrap().unwrap();
        // It cannot write the report before the pipe is open.
        kill_process(rank_of(&job.0[0], 0).unwrap(), Signal::KILL).unwrap();
        let rest = std::thread::spawn(move || lines.for_each(|line| drop(line.unwrap())));
        let (output, report) = end(job, open(&folder), b"</html>");
        rest.join().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(report.starts_with("<!"), "{report}");
    }
}
