//! The progress bar is shown on a terminal only. The terminal is made by `script`; where that is not installed the
//! test says so and passes.

use std::process::{Command, Stdio};

use crate::common::{Folder, text};
use crate::ddp_linear::LINEAR;

/// Long enough for one process, and for ranks, which wait for each other in each step: runs shorter than 0.3 s show no
/// bar.
const LONG: &str = "--epochs 300 --samples 6400";
const LONG_FOR_RANKS: &str = "--epochs 100 --samples 6400";

/// Returns what a terminal receives; standard output goes to it, or to a file in the folder.
fn on_terminal(shell: &str, folder: &Folder) -> Option<String> {
    if Command::new("script").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("no `script` here: nothing was tested");
        return None;
    }
    let command = LINEAR.command();
    let mut script = Command::new("script");
    for (name, _) in command.get_envs() {
        script.env_remove(name);
    }
    script.env("PROGRAM", command.get_program()).env("OUT", folder.argument("out"));
    script.args(["-qefc", &format!("exec {shell}"), "/dev/null"]);
    let output = script.env("TERM", "xterm").stdin(Stdio::null()).output().unwrap();
    let seen = text(&output.stdout);
    assert!(output.status.success(), "{seen}");
    Some(seen)
}

fn losses(text: &str) -> usize {
    let whole = |line: &&str| {
        line.starts_with('[')
            && line.split_once("] loss: ").is_some_and(|(_, loss)| loss.parse::<f32>().is_ok())
    };
    text.lines().filter(whole).count()
}

#[test]
fn a_bar_on_a_terminal() {
    let folder = Folder::new();
    let command = format!("\"$PROGRAM\" ddp-linear --world-size 1 {LONG} >\"$OUT\"");
    let Some(seen) = on_terminal(&command, &folder) else { return };
    assert!(seen.contains(" of 60000") && seen.contains(" left"), "{seen}");

    let printed = std::fs::read_to_string(folder.path("out")).unwrap();
    assert_eq!(losses(&printed), 4 * 300, "two lines an epoch, of both parts");
    assert!(!printed.contains('\u{1b}'));
}

#[test]
fn the_bar_of_a_narrow_terminal_does_not_wrap() {
    let folder = Folder::new();
    let command =
        format!("sh -c 'stty rows 24 cols 40; exec \"$PROGRAM\" ddp-linear --world-size 1 {LONG} >\"$OUT\"'");
    let Some(seen) = on_terminal(&command, &folder) else { return };
    let drawn: Vec<&str> =
        seen.split(['\r', '\n', '\u{1b}']).filter(|part| part.contains(" of 60000")).collect();
    assert!(!drawn.is_empty(), "{seen}");
    for part in drawn {
        // Ignores what remains of the escape sequence before it, and the blanks after it.
        let shown = part.strip_prefix("[2K").unwrap_or(part).trim_end();
        assert!(shown.chars().count() < 40, "{shown}");
    }
}

#[test]
fn ranks_have_a_bar_too_and_it_keeps_out_of_their_lines() {
    let folder = Folder::new();
    for command in ["\"$PROGRAM\"", "\"$PROGRAM\" launch --nproc-per-node 2 -- girandole"] {
        let Some(seen) = on_terminal(&format!("{command} ddp-linear {LONG_FOR_RANKS}"), &folder) else {
            return;
        };
        assert!(seen.contains(" of 10000, "), "{command}: the ranks take half as many steps as one process");
        // The text after the last carriage return and the escape sequence that clears the line.
        let lines: Vec<&str> = seen.lines().map(|line| line.trim_end_matches('\r')).collect();
        let shown = |line: &&str| {
            let last = line.rsplit('\r').next().unwrap_or_default();
            last.rsplit("\u{1b}[2K").next().unwrap_or_default().to_string()
        };
        let text = lines.iter().map(shown).collect::<Vec<_>>().join("\n");
        assert_eq!(losses(&text), 3 * 100, "{command}: two lines an epoch of one process, one of two ranks");
    }
}
