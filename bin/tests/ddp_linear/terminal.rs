//! The bar is there on a terminal, and only there. `script` makes the terminal; where there is none the test says so and
//! passes.

use std::process::{Command, Stdio};

use crate::command::{Folder, girandole, text};

/// The first part takes long enough: the bar keeps out of runs of less than 0.3 s.
const LONG: &str = "--world-size 1 --epochs 300 --samples 6400";

#[test]
fn a_bar_on_a_terminal() {
    if Command::new("script").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("no `script` here: nothing was tested");
        return;
    }
    let folder = Folder::new();
    let command = girandole();
    let mut script = Command::new("script");
    for (name, _) in command.get_envs() {
        script.env_remove(name);
    }
    script.env("PROGRAM", command.get_program()).env("OUT", folder.argument("out"));
    script.args(["-qefc", &format!("exec \"$PROGRAM\" ddp-linear {LONG} >\"$OUT\""), "/dev/null"]);
    let output = script.env("TERM", "xterm").stdin(Stdio::null()).output().unwrap();
    let seen = text(&output.stdout);
    assert!(output.status.success(), "{seen}");
    assert!(seen.contains(" of 60000") && seen.contains(" left"), "{seen}");

    let printed = std::fs::read_to_string(folder.path("out")).unwrap();
    assert_eq!(
        printed.lines().filter(|line| line.starts_with('[')).count(),
        4 * 300,
        "two lines an epoch, of both parts"
    );
    assert!(!printed.contains('\u{1b}'));
}
