//! Running the program's commands and examining their output.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// Prefixes of environment variables that a launcher or a user may have set.
const ENVIRONMENT: [&str; 19] = [
    "RANK", "PET_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "ENVIRONMENT", "WORLD_SIZE", "LOCAL_",
    "MASTER_", "GIRANDOLE_", "NODE_", "GROUP_", "ROLE_", "TORCHELASTIC_", "OMP_NUM_THREADS",
    "RAYON_NUM_THREADS", "PYTHONUNBUFFERED",
];

/// Removes this process's rank-related environment variables from a command.
pub(crate) fn clean(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        if ENVIRONMENT.iter().any(|begin| name.to_string_lossy().starts_with(begin)) {
            command.env_remove(name);
        }
    }
    command
}

/// Returns the program, without a subcommand.
pub(crate) fn girandole() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_girandole"));
    clean(&mut command).stdin(Stdio::null());
    command
}

/// Runs a command, which must succeed.
pub(crate) fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, text(&output.stderr));
    output
}

/// Runs a command, which must fail before it does anything; returns its one-line error and its exit code.
pub(crate) fn refuse_with(command: &mut Command, arguments: &[&str]) -> (String, i32) {
    let output = command.args(arguments).output().unwrap();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    let code = output.status.code().unwrap_or_else(|| panic!("{arguments:?}: {}", output.status));
    assert!(code == 1 || code == 2, "{arguments:?}: exit code {code}\n{err}");
    assert_eq!(out, "", "{arguments:?} printed something, then failed: {err}");
    assert!(err.starts_with("error: "), "{arguments:?}: {err}");
    // Errors of clap itself are followed by a hint.
    let by_parser = err.contains("For more information, try '--help'.");
    assert!(by_parser || err.lines().count() == 1, "{arguments:?}: {err}");
    (err, code)
}

/// One of the program's subcommands.
pub(crate) struct Girandole(pub(crate) &'static str);

impl Girandole {
    /// Returns the command, without this process's rank-related environment variables.
    pub(crate) fn command(&self) -> Command {
        let mut command = girandole();
        command.arg(self.0);
        command
    }

    /// Runs it; it must succeed.
    pub(crate) fn succeed(&self, arguments: &[&str]) -> Output {
        succeed(self.command().args(arguments))
    }

    /// Runs it with options and their values; it must succeed.
    pub(crate) fn succeed_with(&self, options: &[(&str, String)]) -> Output {
        let arguments: Vec<&str> =
            options.iter().flat_map(|(option, value)| [*option, value.as_str()]).collect();
        self.succeed(&arguments)
    }

    /// Runs it; it must fail before it does anything. Returns its one-line error.
    pub(crate) fn refuse(&self, arguments: &[&str]) -> String {
        refuse_with(&mut self.command(), arguments).0
    }
}

/// Returns the printed lines, with times replaced by `...`.
pub(crate) fn without_times(output: &Output) -> Vec<String> {
    let timed = |line: &str| line.contains(" time") || line.starts_with("speed-up");
    let strip = |line: &str| match line.split_once(": ") {
        Some((before, _)) if timed(line) => format!("{before}: ..."),
        _ => line.to_string(),
    };
    text(&output.stdout).lines().map(strip).collect()
}

/// Returns the lines of output in sorted order, independent of which rank printed first.
pub(crate) fn sorted(output: &Output) -> Vec<String> {
    let mut lines: Vec<String> = text(&output.stdout).lines().map(str::to_string).collect();
    lines.sort();
    lines
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A temporary folder for the files of a run.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn argument(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_string()
    }
}

/// Reads the lines of a metrics file.
pub(crate) fn metrics(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Returns the losses of a metrics file, in order; epochs and batches must count up without a gap.
pub(crate) fn losses(path: &Path) -> Vec<f32> {
    losses_of(&metrics(path), None)
}

/// Returns the losses of one of several runs in a metrics file.
pub(crate) fn losses_of(lines: &[Value], run: Option<&str>) -> Vec<f32> {
    let steps: Vec<&Value> =
        lines.iter().filter(|line| line["event"] == "step" && line["run"].as_str() == run).collect();
    let mut last = (0, None);
    for step in &steps {
        let (epoch, batch) = (step["epoch"].as_u64().unwrap(), step["batch"].as_u64().unwrap());
        let expected = if epoch == last.0 { last.1.map_or(0, |batch| batch + 1) } else { 0 };
        assert_eq!(batch, expected, "epoch {epoch}");
        assert!(epoch == last.0 || epoch == last.0 + 1);
        last = (epoch, Some(batch));
    }
    steps.iter().map(|step| step["loss"].as_f64().unwrap() as f32).collect()
}

/// Whether this test's parent process made it ignore a signal; the command then inherits that.
pub(crate) fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal - 1) & 1 == 1
}
