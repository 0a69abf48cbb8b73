//! Number of threads for candle in a process.
//!
//! If `RAYON_NUM_THREADS` is not set, candle counts the processor's cores for every matrix product, by reading
//! `/proc/cpuinfo`: for small models that takes several times as long as the products. So the program sets the
//! variable.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::available_parallelism;

/// The environment variable.
pub const VARIABLE: &str = "RAYON_NUM_THREADS";

/// True if this process chose its number of threads itself.
static CHOSEN_HERE: AtomicBool = AtomicBool::new(false);

/// Returns the value to set the variable to, at the start of `main`: the cores, divided by the number of ranks on
/// this machine. `None` if the variable is already set; a value that makes no sense is reported later
/// ([`launch::check_threads`]).
pub fn choose() -> Option<String> {
    if std::env::var_os(VARIABLE).is_some_and(|value| !value.is_empty()) {
        return None;
    }
    // The first process of a container starts this program once more (`launch::worker_guard`), where it is chosen.
    if std::process::id() == 1 {
        return None;
    }
    CHOSEN_HERE.store(true, Ordering::Relaxed);
    // An invalid environment is reported later, when the process joins the group.
    let neighbours = comm::LaunchedRank::from_env().ok().flatten().and_then(|place| place.local_world_size);
    Some(share(neighbours.unwrap_or(1)))
}

/// Returns the value for each of the ranks that this process starts; `None` if they inherit the variable that the
/// user set.
pub(crate) fn for_ranks(world_size: usize) -> Option<String> {
    CHOSEN_HERE.load(Ordering::Relaxed).then(|| share(world_size))
}

fn share(ranks: usize) -> String {
    let cores = available_parallelism().map_or(1, usize::from);
    (cores / ranks.max(1)).max(1).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_shared_and_each_rank_has_one() {
        let cores = available_parallelism().unwrap().get();
        assert_eq!((share(1), share(0), share(cores)), (cores.to_string(), cores.to_string(), "1".into()));
        assert_eq!(share(10 * cores), "1");
        assert_eq!(for_ranks(1), None, "nothing was chosen in this process");
    }
}
