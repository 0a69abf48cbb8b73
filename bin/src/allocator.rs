//! How ranks get large blocks of memory.
//!
//! A training step frees and asks for the same large blocks again and again. The GNU C library gives those of 32 MiB and more
//! back to the system at once, and the system clears every page of the next one, which took a third of a step of `fsdp-mlp`.
//! So the ranks that the program starts are told to keep them. They take about as much memory: blocks are used again.

/// The variable by which the library is told.
pub(crate) const VARIABLE: &str = "GLIBC_TUNABLES";

/// Blocks below this are kept, of which there is none.
const KEPT: &str = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296";

/// What the variable is to be for ranks; `None` where somebody has set it, or there is another library.
pub(crate) fn for_ranks() -> Option<&'static str> {
    let is_glibc = cfg!(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"));
    (is_glibc && std::env::var_os(VARIABLE).is_none()).then_some(KEPT)
}
