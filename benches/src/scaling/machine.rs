//! Description of the machine that a report was measured on.

use std::process::Command;
use std::thread::available_parallelism;

use comm::internal::{host_name, total_memory};
use serde::{Deserialize, Serialize};

/// A machine, and the commit of the measured program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Host name.
    pub host: String,
    /// Processor model, where known.
    pub processor: Option<String>,
    /// Number of cores that this program may use.
    pub cores: usize,
    /// Total memory, where known.
    pub memory_bytes: Option<u64>,
    /// Git commit, with `-dirty` if files differ from it; `None` if `git` cannot tell.
    pub commit: Option<String>,
    /// Whether the program was built with optimisation.
    pub optimised: bool,
}

impl Machine {
    /// Describes this machine.
    pub fn this() -> Self {
        Self {
            host: host_name(),
            processor: std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| processor(&text)),
            cores: available_parallelism().map_or(1, usize::from),
            memory_bytes: total_memory().map(|memory| memory.bytes),
            commit: commit(),
            optimised: !cfg!(debug_assertions),
        }
    }
}

fn processor(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches(['\t', ' ', ':']).trim().to_string())
}

fn commit() -> Option<String> {
    let folder = env!("CARGO_MANIFEST_DIR");
    let arguments = ["-C", folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"];
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_string();
    (output.status.success() && !text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named() {
        let text = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: another\n";
        assert_eq!(processor(text).as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(processor("x"), None);
        assert!(Machine::this().cores > 0);
    }
}
