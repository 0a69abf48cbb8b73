//! Memory of each rank of a plan, and what limits it.

use comm::internal::UsableMemory;

use crate::units::show_bytes;

/// Memory of each rank.
#[derive(Debug, Clone, PartialEq)]
pub struct RankMemory {
    /// In bytes.
    pub bytes: f64,
    /// What limits it, to be displayed beside it; empty if nothing but the machine does.
    pub limit: String,
}

impl RankMemory {
    pub(super) fn share(total: &UsableMemory, ranks: usize) -> Self {
        let bytes = total.bytes as f64;
        let limit = match &total.limit {
            Some(_) => {
                format!("this machine has {}{}", show_bytes(bytes), total.restriction())
            }
            None => String::new(),
        };
        Self { bytes: bytes / ranks as f64, limit }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_the_memory_of_a_container_and_it_is_said() {
        let total = UsableMemory { bytes: 256 << 20, limit: Some("/sys/fs/cgroup/memory.max".into()) };
        let limit =
            "this machine has 268 MB for this container or job (/sys/fs/cgroup/memory.max)".to_string();
        assert_eq!(RankMemory::share(&total, 4), RankMemory { bytes: 67108864.0, limit });
        let machine = UsableMemory { limit: None, ..total };
        assert_eq!(RankMemory::share(&machine, 2), RankMemory { bytes: 134217728.0, limit: String::new() });
    }
}
