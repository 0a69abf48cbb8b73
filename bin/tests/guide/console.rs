//! Commands in the guide: those in `console,run` blocks are run, each in a folder of its own, those in `console,next` blocks in that
//! of the block before, and their output must contain the lines of the `text,part` block below, in order. All other commands must
//! only use options that exist.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::{Folder, clean, girandole, succeed, text};
use crate::pages::{Page, all, page};

#[test]
fn commands_print_what_the_pages_say() {
    let mut runs = 0;
    for page in all() {
        let blocks = page.blocks();
        let mut folder = Folder::new();
        for (place, block) in blocks.iter().enumerate() {
            match block.info.as_str() {
                "console,run" => folder = Folder::new(),
                "console,next" => {}
                _ => continue,
            }
            runs += 1;
            let output = run(&block.code, &folder);
            let Some(expected) = blocks.get(place + 1).filter(|block| block.info == "text,part") else {
                continue;
            };
            let mut lines = output.lines();
            for line in expected.code.lines().filter(|line| line.trim() != "...") {
                let found = lines.any(|printed| printed.trim_end() == line.trim_end());
                assert!(
                    found,
                    "{}: `{}` does not print\n{line}\nin this place:\n{output}",
                    page.name(),
                    block.code
                );
            }
        }
    }
    assert!(runs >= 7, "{runs} blocks");
}

/// Runs shell commands in a folder; returns standard output.
fn run(commands: &str, folder: &Folder) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_girandole")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-euc", commands]).current_dir(folder.path(".")).stdin(Stdio::null());
    text(&succeed(clean(&mut shell).env("PATH", path)).stdout)
}

#[test]
fn commands_have_the_options_that_the_pages_give_them() {
    let mut helps = BTreeMap::new();
    let mut options = 0;
    for page in all() {
        for line in commands(&page) {
            let mut words = line.split_whitespace();
            let Some(command) =
                words.next().filter(|word| word.starts_with(|c: char| c.is_ascii_lowercase()))
            else {
                continue;
            };
            let help: &String = helps
                .entry(command.to_owned())
                .or_insert_with(|| text(&succeed(girandole().args([command, "--help"])).stdout));
            for word in words.take_while(|word| *word != "--").filter(|word| word.starts_with("--")) {
                let option = word.split('=').next().unwrap().trim_end_matches([',', '.', ')']);
                let known = help.split(|c: char| !(c.is_ascii_alphanumeric() || "-_".contains(c)));
                assert!(
                    option == "--help" || known.into_iter().any(|known| known == option),
                    "{}: `girandole {line}`: there is no {option}",
                    page.name()
                );
                options += 1;
            }
        }
    }
    assert!(options > 20, "{options} options");
}

/// Returns what follows `girandole` in the code of a page.
fn commands(page: &Page) -> Vec<String> {
    let blocks = page.blocks();
    let consoles = blocks.iter().filter(|block| block.info.starts_with("console"));
    let mut lines: Vec<String> =
        consoles.flat_map(|block| block.code.lines().map(str::to_owned).collect::<Vec<_>>()).collect();
    lines.extend(page.code_spans());
    let starts = ["girandole ", "cargo run -p bin -- "];
    let after = |line: &String| {
        let line = line.split(" #").next().unwrap_or_default();
        let found = starts.iter().filter_map(|start| Some(line.find(start)? + start.len())).min()?;
        Some(line[found..].to_owned())
    };
    lines.iter().filter_map(after).collect()
}

#[test]
fn the_readmes_program_is_the_example_that_is_run() {
    let blocks = page("README.md").blocks();
    let program = blocks.iter().find(|block| block.info == "rust,no_run").expect("a program");
    let example = page("bin/examples/own_program.rs").text;
    let (_, example) = example.split_once("\n\n").expect("a head");
    assert_eq!(example, program.code);
}
