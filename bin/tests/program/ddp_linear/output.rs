//! Output, and that it is reproducible.

use crate::common::{Folder, metrics, text, without_times};
use crate::ddp_linear::LINEAR;

/// Returns a line with `#` in place of each number that depends on the run.
fn shape(line: &str) -> String {
    let Some((before, after)) = line.rsplit_once(": ") else { return line.to_string() };
    let mut shape = String::new();
    for c in after.chars() {
        match c {
            '0'..='9' | '.' | '-' if shape.ends_with('#') => {}
            '0'..='9' | '-' => shape.push('#'),
            other => shape.push(other),
        }
    }
    format!("{before}: {shape}")
}

#[test]
fn stdout_has_what_the_document_prints_and_nothing_else() {
    let output = LINEAR.succeed(&["--epochs", "2", "--samples", "6400"]);
    let expected = "\
available GPUs: #
warning: no GPU found, training on the CPU

===== single-process training =====
[1, 100] loss: #
[1, 200] loss: #
[2, 100] loss: #
[2, 200] loss: #
single-process training done, total time: # s
linear.weight: #
linear.bias: #

===== DDP training (2 ranks, total batch size 64) =====
[1, 100] loss: #
[2, 100] loss: #
DDP training done, total time: # s
linear.weight: #
linear.bias: #

===== comparison =====
single-process training time: # s
DDP training time with 2 ranks: # s";
    let lines: Vec<String> = text(&output.stdout).lines().map(str::to_string).collect();
    let (last, rest) = lines.split_last().unwrap();
    assert_eq!(rest.iter().map(|line| shape(line)).collect::<Vec<_>>().join("\n"), expected);
    assert!(last.starts_with("speed-up: ") && last.ends_with("x (ideal: 2.00x)"), "{last}");
    let remarks = text(&output.stderr);
    assert!(remarks.starts_with("note: ") && remarks.lines().count() == 1, "{remarks}");
}

#[test]
fn with_the_total_batch_kept_there_is_nothing_to_remark() {
    let output = LINEAR.succeed(&["--epochs", "1", "--samples", "64", "--keep-total-batch"]);
    assert_eq!(text(&output.stderr), "");
    assert!(text(&output.stdout).contains("===== DDP training (2 ranks, total batch size 32) ====="));
}

#[test]
fn one_rank_computes_what_one_process_does() {
    let output = LINEAR.succeed(&["--epochs", "1", "--samples", "3200", "--world-size", "1"]);
    assert_eq!(text(&output.stderr), "");
    let text = text(&output.stdout);
    assert!(text.contains("===== DDP training (1 rank, total batch size 32) ====="), "{text}");
    assert!(text.contains("DDP training time with 1 rank: ") && text.contains("(ideal: 1.00x)"), "{text}");
}

#[test]
fn two_runs_are_equal_to_the_bit() {
    let folder = Folder::new();
    let run = |name: &str, seed: &str| {
        let (file, save) =
            (folder.argument(&format!("{name}.jsonl")), folder.argument(&format!("{name}.st")));
        let fixed = ["--epochs", "2", "--samples", "3210", "--world-size", "3", "--seed", seed];
        let output = LINEAR.succeed(&[&fixed[..], &["--metrics", &file, "--save", &save]].concat());
        let mut lines = metrics(file.as_ref());
        lines.retain(|line| line["event"] == "step");
        (without_times(&output), lines, std::fs::read(save).unwrap())
    };
    let first = run("first", "42");
    assert!(first == run("second", "42"));
    assert!(first.2 != run("third", "43").2);
}

#[test]
fn a_closed_output_is_no_reason_to_crash() {
    // Like `>&-` and `2>&-` in a shell.
    for closed in ["exec \"$@\" >&-", "exec \"$@\" 2>&-", "exec \"$@\" <&- >&- 2>&-"] {
        let mut shell = std::process::Command::new("sh");
        let command = LINEAR.command();
        shell.args(["-c", closed, "sh"]).arg(command.get_program()).args(command.get_args());
        for (name, _) in command.get_envs() {
            shell.env_remove(name);
        }
        let output = shell.args(["--epochs", "1", "--samples", "64"]).output().unwrap();
        assert!(output.status.success(), "{closed}: {}\n{}", output.status, text(&output.stderr));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_told() {
    let full = || std::process::Stdio::from(std::fs::File::options().write(true).open("/dev/full").unwrap());
    let output = LINEAR.command().stdout(full()).output().unwrap();
    let remarks = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    let last = remarks.lines().last().unwrap();
    assert!(last.starts_with("error: cannot write to standard output: No space left"), "{remarks}");
    let output = LINEAR.command().args(["--metrics", "/dev/full", "--samples", "64"]).output().unwrap();
    assert!(text(&output.stderr).contains("error: cannot write /dev/full: No space left"));
    assert_eq!(output.status.code(), Some(1));
}
