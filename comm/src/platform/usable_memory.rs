//! Amount of memory that processes may use, and what limits it.

use std::path::PathBuf;

/// Memory of this machine, or, where that is less, of the container or the scheduler's job in which this process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsableMemory {
    /// In bytes.
    pub bytes: u64,
    /// The file that has the limit of the container or job; `None` if the machine itself has no more.
    pub limit: Option<PathBuf>,
}

impl UsableMemory {
    /// Returns what to add to "this machine has so much memory": that it is a container or job that has it; nothing if it
    /// is the machine.
    pub fn restriction(&self) -> String {
        let file = self.limit.as_ref();
        file.map_or(String::new(), |file| format!(" for this container or job ({})", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_told_from_a_machine() {
        let file = PathBuf::from("/sys/fs/cgroup/memory.max");
        let told = " for this container or job (/sys/fs/cgroup/memory.max)";
        assert_eq!(UsableMemory { bytes: 1, limit: Some(file) }.restriction(), told);
        assert_eq!(UsableMemory { bytes: 1, limit: None }.restriction(), "");
    }
}
