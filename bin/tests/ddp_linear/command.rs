//! Running the command.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The command, without what this process's environment says of ranks.
pub(crate) fn girandole() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_girandole"));
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"] {
        command.env_remove(name);
    }
    command.arg("ddp-linear");
    command
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs it to its good end.
pub(crate) fn succeed(arguments: &[&str]) -> Output {
    let output = girandole().args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}\n{}", output.status, text(&output.stderr));
    output
}

/// A folder for the files of one run.
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

/// The lines of a metrics file.
pub(crate) fn metrics(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The losses of one run, in order; epochs and batches must count up without a gap.
pub(crate) fn losses(lines: &[Value], run: &str) -> Vec<f32> {
    let steps: Vec<&Value> =
        lines.iter().filter(|line| line["event"] == "step" && line["run"] == run).collect();
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
