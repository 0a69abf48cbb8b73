//! Starting this program as a user's.

use std::io::Read;
use std::process::{Command, Output, Stdio};

use crate::program::ROLE;

/// What launchers and schedulers set, by how it begins.
const OTHERS: [&str; 13] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "NODE_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "GIRANDOLE_",
    "PET_",
    "SLURM_",
    "OMPI_",
    "PMI",
];

/// The program in this role, without what this process's environment says of ranks.
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

/// Its end, that of several which run at the same time.
pub(crate) fn end<const N: usize>(commands: [Command; N]) -> [Output; N] {
    let children = commands.map(|mut command| command.spawn().unwrap());
    let threads = children.map(|child| std::thread::spawn(move || child.wait_with_output().unwrap()));
    threads.map(|thread| thread.join().unwrap())
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// All lines of some outputs, in an order that does not depend on who was first.
pub(crate) fn lines(outputs: &[Output]) -> Vec<String> {
    let all: String = outputs.iter().map(|output| text(&output.stdout)).collect();
    let mut lines: Vec<String> = all.lines().map(str::to_string).collect();
    lines.sort();
    lines
}

/// Reads until these words have come.
pub(crate) fn read_until(stream: &mut impl Read, words: &str, times: usize) {
    let mut read = String::new();
    while read.matches(words).count() < times {
        let mut chunk = [0; 4096];
        let count = stream.read(&mut chunk).unwrap();
        assert!(count > 0, "only {read:?}");
        read += &String::from_utf8_lossy(&chunk[..count]);
    }
}
