//! What it was measured on.

use std::process::Command;
use std::thread::available_parallelism;

use bin::start::host_name;
use comm::total_memory_bytes;
use serde::{Deserialize, Serialize};

/// A machine, and the commit that ran on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Its name.
    pub host: String,
    /// Its processor, where known.
    pub processor: Option<String>,
    /// The cores that this program may use.
    pub cores: usize,
    /// Its memory, where known.
    pub memory_bytes: Option<u64>,
    /// The commit, with `-dirty` where files differ from it; where `git` knows.
    pub commit: Option<String>,
    /// Whether the program was built for speed.
    pub optimised: bool,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        Self {
            host: host_name(),
            processor: std::fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| processor(&text)),
            cores: available_parallelism().map_or(1, usize::from),
            memory_bytes: total_memory_bytes(),
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
