//! A full disk: files of an earlier run are kept.

use std::process::{Command, Output, Stdio};

use crate::common::{Folder, clean, girandole, metrics, succeed, text};

/// Runs the program with file sizes limited to `blocks` times 512 bytes.
fn on_full_disk(blocks: usize, arguments: &[&str]) -> Output {
    let mut command = Command::new("sh");
    let script = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"");
    // Shared memory would count as a file.
    clean(&mut command).env("GIRANDOLE_TRANSPORT", "tcp").env("RUST_BACKTRACE", "1").stdin(Stdio::null());
    command.args(["-c", &script, env!("CARGO_BIN_EXE_girandole")]).args(arguments).output().unwrap()
}

const LINEAR: [&str; 7] = ["ddp-linear", "--epochs", "4", "--samples", "640", "--world-size", "2"];
const PICTURES: [&str; 5] = ["cifar10", "--samples", "16", "--test-samples", "4"];
const PLAN: [&str; 9] =
    ["plan", "ddp-mlp", "--bandwidth", "1GB/s", "--latency", "10us", "--flops", "1TFLOP/s", "--memory=8GB"];
const BENCH: [&str; 7] = ["comm-bench", "--ops", "all_reduce", "--sizes", "4K", "--calls", "2"];

#[test]
fn an_earlier_file_is_as_it_was() {
    for (arguments, option) in [
        (&LINEAR[..], "--trace"),
        (&LINEAR, "--report"),
        (&LINEAR, "--save"),
        (&LINEAR, "--metrics"),
        (&PICTURES, "--picture"),
        (&PLAN, "--json"),
        (&BENCH, "--json"),
        (&["fsdp-mlp", "--features", "24", "--hidden", "50", "--steps", "1"], "--save"),
        (&["tensor-parallel-mlp", "--hidden-size", "16", "--samples", "16", "--epochs", "1"], "--save"),
        (&["pipeline-transformer", "--epochs", "1"], "--save"),
    ] {
        let folder = Folder::new();
        let path = folder.argument("result");
        std::fs::write(&path, "earlier").unwrap();
        let output = on_full_disk(0, &[arguments, &[option, &path]].concat());
        let said = text(&output.stderr);
        assert!(
            !output.status.success() && said.contains("File too large"),
            "{arguments:?} {option}: {said}"
        );
        assert!(said.contains(&path), "{arguments:?} {option}: {said}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "earlier", "{arguments:?} {option}");
        assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 1, "{arguments:?} {option}");
        succeed(girandole().args(arguments).args([option, &path]));
        assert_ne!(std::fs::read_to_string(&path).unwrap_or_default(), "earlier", "{arguments:?} {option}");
        assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 1, "{arguments:?} {option}");
    }
}

/// The launcher's line includes the rank's message, without a backtrace.
#[test]
fn a_language_model_tells_the_reason_in_one_line() {
    let folder = Folder::new();
    let [path, text_file, out] = ["m.jsonl", "text", "out"].map(|name| folder.argument(name));
    std::fs::write(&text_file, "a text of some words\n".repeat(50)).unwrap();
    let size = ["--layers", "1", "--hidden", "16", "--heads", "2", "--length", "16", "--steps", "1000"];
    let files = ["pretrain", "--data", &text_file, "--out", &out, "--metrics", &path];
    let output = on_full_disk(64, &[&files[..], &size].concat());
    let said = text(&output.stderr);
    let last = said.lines().last().unwrap();
    assert!(last.contains(&format!("exited with code 1: cannot write {path}: File too large")), "{said}");
    assert!(!said.contains("candle_core::"), "{said}");
}

#[test]
fn metrics_end_with_a_whole_line_and_those_of_an_earlier_run_are_kept() {
    let folder = Folder::new();
    let (path, earlier) = (folder.argument("m.jsonl"), folder.path("m.jsonl.earlier"));
    let old = "{\"event\":\"step\",\"epoch\":0,\"batch\":0,\"loss\":1.0}\n";
    std::fs::write(&path, old).unwrap();
    let output = on_full_disk(2, &[&LINEAR[..], &["--metrics", &path]].concat());
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains(&format!("cannot write {path}: ")), "{said}");
    assert!(
        said.contains(&format!("the lines of an earlier run are in {} now", earlier.display())),
        "{said}"
    );
    assert_eq!(std::fs::read_to_string(&earlier).unwrap(), old);
    let written = std::fs::read(&path).unwrap();
    assert!(written.len() <= 1024 && written.ends_with(b"\n"), "{} bytes", written.len());
    assert!(metrics(path.as_ref()).len() > 5);
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 2);
}
