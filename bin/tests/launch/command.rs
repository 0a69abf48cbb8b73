//! Running the program.

use std::process::{Command, Output, Stdio};

/// The program, with nothing in its environment that speaks of ranks.
pub(crate) fn girandole() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_girandole"));
    clean(&mut command).stdin(Stdio::null());
    command
}

/// Takes out of the environment what a launcher or a user may have set.
pub(crate) fn clean(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy().into_owned();
        let speaks =
            text.starts_with("GIRANDOLE_") || text.starts_with("TORCHELASTIC_") || text.ends_with("RANK");
        let known = ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"];
        if speaks || known.iter().any(|known| text.ends_with(known)) {
            command.env_remove(name);
        }
    }
    command
}

/// `launch` of a shell script on so many ranks.
pub(crate) fn shell(ranks: usize, script: &str) -> Command {
    let mut command = girandole();
    command.args(["launch", "--nproc-per-node", &ranks.to_string(), "--", "sh", "-c", script]);
    command
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Its lines, in an order that does not depend on who was first.
pub(crate) fn sorted(output: &Output) -> Vec<String> {
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_string).collect();
    lines.sort();
    lines
}

pub(crate) fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output.stderr));
    output
}

/// What is printed, without the numbers of lines that tell times.
pub(crate) fn without_times(output: &Output) -> Vec<String> {
    let timed = |line: &str| line.contains(" time") || line.starts_with("speed-up");
    let strip = |line: &str| match line.split_once(": ") {
        Some((before, _)) if timed(line) => format!("{before}: ..."),
        _ => line.to_string(),
    };
    text(&output.stdout).lines().map(strip).collect()
}
