//! Compatibility of the processes of one job: library version, byte order and pointer width must match, so that messages
//! mean the same on both sides. Numbers are sent as they lie in memory.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::rendezvous::text::sanitize;

/// Longest version that is shown, in characters.
const MAX_VERSION: usize = 40;

/// Version and target of a rank's program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct BuildInfo {
    /// Of the library: ranks of different versions may order their operations differently.
    version: String,
    order: ByteOrder,
    pointer_bits: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum ByteOrder {
    Little,
    Big,
}

impl BuildInfo {
    /// Returns that of this process.
    pub(super) fn own() -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            order: if cfg!(target_endian = "little") { ByteOrder::Little } else { ByteOrder::Big },
            pointer_bits: usize::BITS,
        }
    }

    /// Returns why a rank that came cannot be in a job with this one. Both are given by rank and host.
    pub(super) fn incompatibility(
        &self,
        own: (usize, &str),
        theirs: &Self,
        who: (usize, &str),
    ) -> Option<String> {
        let help = match () {
            () if self == theirs => return None,
            () if self.version != theirs.version => "run the same version everywhere",
            () => "run it on machines of one byte order and pointer width",
        };
        let [(own, own_host), (number, host)] = [own, who];
        Some(format!(
            "rank {number} (host {host}) runs {theirs}, and rank {own} (host {own_host}) {self}: {help}"
        ))
    }
}

impl fmt::Display for BuildInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = match self.order {
            ByteOrder::Little => "little-endian",
            ByteOrder::Big => "big-endian",
        };
        let version = sanitize(&self.version, MAX_VERSION);
        write!(f, "version {version} ({}-bit, {order})", self.pointer_bits)
    }
}

#[cfg(test)]
impl BuildInfo {
    /// Returns that of a program of another version.
    pub(super) fn of_version(version: &str) -> Self {
        Self { version: version.into(), ..Self::own() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_told_with_both_sides() {
        let own = BuildInfo { version: "1.2.3".into(), order: ByteOrder::Little, pointer_bits: 64 };
        let misfit = |theirs: &BuildInfo| own.incompatibility((0, "a"), theirs, (3, "b"));
        assert_eq!(misfit(&own.clone()), None);
        for (theirs, runs, help) in [
            (
                BuildInfo { version: "1.2.4".into(), ..own.clone() },
                "1.2.4 (64-bit, little-endian)",
                "run the same version everywhere",
            ),
            (
                BuildInfo { order: ByteOrder::Big, ..own.clone() },
                "1.2.3 (64-bit, big-endian)",
                "run it on machines of one byte order and pointer width",
            ),
            (
                BuildInfo { pointer_bits: 32, ..own.clone() },
                "1.2.3 (32-bit, little-endian)",
                "run it on machines of one byte order and pointer width",
            ),
        ] {
            let expected = format!(
                "rank 3 (host b) runs version {runs}, and rank 0 (host a) version 1.2.3 (64-bit, little-endian): {help}"
            );
            assert_eq!(misfit(&theirs), Some(expected));
        }
        let rude = BuildInfo { version: format!("\u{1b}[2J{}", "9".repeat(1000)), ..own.clone() };
        let text = misfit(&rude).unwrap();
        assert!(text.len() < 300 && !text.contains('\u{1b}'), "{text}");
    }
}
