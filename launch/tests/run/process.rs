//! Starts this program in the role of a user's program.

use std::io::Read;
use std::process::{Command, Output, Stdio};

use crate::program::ROLE;

/// Prefixes of the variables that launchers and schedulers set.
const OTHERS: [&str; 13] = [
    "RANK", "WORLD_SIZE", "LOCAL_", "NODE_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "GIRANDOLE_",
    "PET_", "SLURM_", "OMPI_", "PMI",
];

/// Returns the command of the program in this role, without variables about ranks from this process's environment.
pub(crate) fn program(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (name, _) in std::env::vars_os() {
        if OTHERS.iter().any(|begin| name.to_string_lossy().starts_with(begin)) {
            command.env_remove(name);
        }
    }
    command.env(ROLE, role).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs commands at the same time, and returns their outputs.
pub(crate) fn end<const N: usize>(commands: [Command; N]) -> [Output; N] {
    let children = commands.map(|mut command| command.spawn().unwrap());
    let threads = children.map(|child| std::thread::spawn(move || child.wait_with_output().unwrap()));
    threads.map(|thread| thread.join().unwrap())
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Returns all lines of some outputs, sorted, because their order varies.
pub(crate) fn lines(outputs: &[Output]) -> Vec<String> {
    let all: String = outputs.iter().map(|output| text(&output.stdout)).collect();
    let mut lines: Vec<String> = all.lines().map(str::to_string).collect();
    lines.sort();
    lines
}

/// Reads until these words have appeared `times` times.
pub(crate) fn read_until(stream: &mut impl Read, words: &str, times: usize) {
    let mut read = String::new();
    while read.matches(words).count() < times {
        let mut chunk = [0; 4096];
        let count = stream.read(&mut chunk).unwrap();
        assert!(count > 0, "only {read:?}");
        read += &String::from_utf8_lossy(&chunk[..count]);
    }
}
