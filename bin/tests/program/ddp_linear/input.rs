//! Wrong options: rejected before anything is done.

use std::process::Command;

use crate::common::{Folder, refuse_with, text};
use crate::ddp_linear::LINEAR;

#[test]
fn numbers_that_cannot_be_used() {
    for option in ["--world-size", "--batch-size", "--epochs", "--samples"] {
        for value in ["0", "-1", "1.5", "many", "99999999999999999999999"] {
            let line = LINEAR.refuse(&[option, value]);
            assert!(line.contains(option) && line.contains(value) && line.contains("1 or more"), "{line}");
        }
    }
    for value in ["NaN", "inf", "-1", "fast"] {
        let line = LINEAR.refuse(&["--lr", value]);
        assert!(line.contains("--lr") && line.contains("give a finite number"), "{line}");
    }
    for value in ["0", "-1", "NaN", "inf", "soon"] {
        let line = LINEAR.refuse(&["--timeout", value]);
        assert!(line.contains("--timeout") && line.contains("greater than 0"), "{line}");
    }
    assert!(LINEAR.refuse(&["--seed", "-1"]).contains("--seed"));
}

#[test]
fn more_than_there_can_be() {
    let line = LINEAR.refuse(&["--world-size", "100000"]);
    assert!(line.contains("--world-size: got 100000; give 1 to 4096 ranks"), "{line}");
    let line = LINEAR.refuse(&["--samples", "99999999999999999"]);
    assert!(line.contains("got 99999999999999999; "), "{line}");
    let line = LINEAR.refuse(&["--keep-total-batch", "--batch-size", "3", "--world-size", "4"]);
    assert!(line.contains("--batch-size: got 3; ") && line.contains("give 4 or more"), "{line}");
}

/// The system's limit on open files is checked before any training.
#[test]
fn more_than_this_process_may_open_files_for() {
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -n 60 && exec \"$0\" \"$@\""]).arg(LINEAR.command().get_program());
    let (line, code) = refuse_with(limited.arg("ddp-linear"), &["--world-size", "40"]);
    assert!(line.contains("--world-size: got 40; ") && line.contains("ulimit -n"), "{line}");
    assert_eq!(code, 2);
}

#[test]
fn what_this_build_does_not_have() {
    for (option, value) in
        [("--device", "cuda"), ("--device", "metal"), ("--backend", "nccl"), ("--backend", "mpi")]
    {
        let line = LINEAR.refuse(&[option, value]);
        assert!(line.starts_with(&format!("error: {option} {value} is not available: ")), "{line}");
    }
    assert!(LINEAR.refuse(&["--device", "abacus"]).contains("[possible values: auto, cpu, cuda, metal]"));
    assert!(LINEAR.refuse(&["--backend", "ucc"]).contains("[possible values: auto, tcp, nccl, mpi]"));
}

#[test]
fn options_that_do_not_exist_or_do_not_go_together() {
    assert!(LINEAR.refuse(&["--world-sise", "2"]).contains("'--world-size'"));
    assert!(LINEAR.refuse(&["extra"]).contains("extra"));
    assert!(LINEAR.refuse(&["--data", "x", "--samples", "5"]).contains("--samples"));
    assert!(LINEAR.refuse(&["--lr"]).contains("--lr"));
}

#[test]
fn wrong_input_ends_with_2() {
    for arguments in [["--lr", "NaN"], ["--device", "cuda"], ["--world-size", "5000"]] {
        assert_eq!(refuse_with(&mut LINEAR.command(), &arguments).1, 2);
    }
}

#[test]
fn an_older_result_is_not_lost_to_a_wrong_option() {
    let folder = Folder::new();
    let (metrics, save) = (folder.argument("m.jsonl"), folder.argument("w.safetensors"));
    std::fs::write(&metrics, "old").unwrap();
    std::fs::write(&save, "old").unwrap();
    LINEAR.refuse(&["--metrics", &metrics, "--save", &save, "--init", &folder.argument("missing")]);
    assert_eq!(std::fs::read_to_string(&metrics).unwrap(), "old");
    assert_eq!(std::fs::read_to_string(&save).unwrap(), "old");
    assert_eq!(std::fs::read_dir(folder.path("")).unwrap().count(), 2, "nothing is left beside them");
}

#[test]
fn help_and_version_are_on_stdout() {
    for (option, part) in [
        ("--help", "--keep-total-batch"),
        ("-h", "\n  Files: --init, --data, --save, --metrics, --trace, --report\n"),
    ] {
        let output = LINEAR.command().arg(option).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
        assert!(text(&output.stdout).contains(part));
    }
}
