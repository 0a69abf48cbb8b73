//! Tests of `completions` and `man`.

use std::collections::BTreeSet;
use std::fs::{read_dir, read_to_string, write};
use std::process::Command;

use crate::common::{Folder, girandole, refuse_with, succeed, text};

fn script(shell: &str) -> String {
    text(&succeed(girandole().args(["completions", shell])).stdout)
}

/// Returns all commands, as `girandole -h` lists them.
fn names() -> BTreeSet<String> {
    let help = text(&succeed(girandole().arg("-h")).stdout);
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let words = lines.map_while(|line| line.split_whitespace().next());
    words.filter(|name| *name != "help").map(str::to_string).collect()
}

#[test]
fn there_is_a_script_for_each_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = script(shell);
        for name in names() {
            assert!(script.contains(&name), "{shell}: no {name}");
        }
        assert!(script.contains("checkpoint-dir"), "{shell}");
    }
}

/// Returns bash's completions of the last of these words.
fn complete(script: &str, words: &[&str]) -> Vec<String> {
    let folder = Folder::new();
    let file = folder.path("girandole.bash");
    write(&file, script).unwrap();
    let ask = r#"source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        _girandole "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"; printf '%s\n' "${COMPREPLY[@]}""#;
    let mut bash = Command::new("bash");
    bash.args(["--noprofile", "--norc", "-c", ask, "bash"]).arg(&file).args(words);
    text(&succeed(&mut bash).stdout).lines().map(str::to_string).collect()
}

#[test]
fn bash_completes_commands_options_and_values() {
    let script = script("bash");
    assert_eq!(complete(&script, &["girandole", "pre"]), ["pretrain", "prefer"]);
    assert_eq!(
        complete(&script, &["girandole", "pretrain", "--check"]),
        ["--check-gradient", "--checkpoint-dir", "--checkpoint-every"]
    );
    assert_eq!(
        complete(&script, &["girandole", "ddp-linear", "--backend", ""]),
        ["auto", "tcp", "nccl", "mpi"]
    );
    assert_eq!(complete(&script, &["girandole", "completions", "z"]), ["zsh"]);
}

#[test]
fn an_unknown_shell_is_refused() {
    let (line, code) = refuse_with(girandole().arg("completions"), &["csh"]);
    assert!(code == 2 && line.contains("'csh'") && line.contains("bash"), "{line}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_script_or_help_that_cannot_be_written_is_an_error_of_one_line() {
    for arguments in [&["completions", "bash"][..], &["--help"], &["ddp-linear", "-h"], &["--version"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = girandole().args(arguments).stdout(full).output().unwrap();
        let err = text(&output.stderr);
        let is_told = err.starts_with("error: cannot write to standard output: ");
        assert!(!output.status.success() && is_told, "{arguments:?}: {err}");
        assert_eq!(err.lines().count(), 1, "{arguments:?}: {err}");
    }
}

#[test]
fn the_name_that_is_documented_is_suggested() {
    let (line, _) = refuse_with(girandole().arg("tensor-parallel-mlp"), &["--hidden", "8"]);
    assert!(line.contains("'--hidden-size'") && !line.contains("hidden_size"), "{line}");
}

#[test]
fn each_command_has_a_man_page() {
    let folder = Folder::new();
    let dir = folder.argument("new/man1");
    let printed = text(&succeed(girandole().args(["man", &dir])).stdout);
    let names = names();
    assert_eq!(printed, format!("man pages: {}, folder: {dir}\n", names.len() + 1));
    let mut expected: BTreeSet<String> = names.iter().map(|name| format!("girandole-{name}.1")).collect();
    expected.insert("girandole.1".into());
    let found = read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(found.collect::<BTreeSet<_>>(), expected);
    for name in expected {
        let page = read_to_string(format!("{dir}/{name}")).unwrap();
        let title = format!(".TH {} 1 ", name.trim_end_matches(".1"));
        assert!(page.contains(&title), "{name}: no {title}\n{page}");
    }
    let page = read_to_string(format!("{dir}/girandole-pretrain.1")).unwrap();
    assert!(page.contains("checkpoint\\-every") && page.contains("girandole pretrain \\-\\-data"), "{page}");
    // Existing pages are replaced.
    succeed(girandole().args(["man", &dir]));
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error_of_one_line() {
    let folder = Folder::new();
    let file = folder.argument("file");
    write(&file, "").unwrap();
    for dir in [file.clone(), format!("{file}/below")] {
        let (line, code) = refuse_with(girandole().arg("man"), &[&dir]);
        assert!(code == 1 && line.starts_with(&format!("error: cannot write {dir}: ")), "{line}");
    }
    refuse_with(girandole().arg("man"), &[]);
}
