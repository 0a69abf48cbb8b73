//! Memory estimates: checks before anything is allocated that data and model fit in this machine's memory, or in what a
//! container has of it. Without the check, only the operating system would stop an oversized run.

use comm::LaunchedRank;
use comm::internal::{UsableMemory, total_memory};

use crate::devices;
use crate::error::{Result, refuse};
use crate::options::{Backend, CommonOptions, DeviceKind, RankOptions};

const GIB: f64 = (1u64 << 30) as f64;
/// Minimum bytes per sample for its index in a shuffled order.
pub const INDEX_BYTES: usize = size_of::<u32>();

/// Returns the number of ranks on this machine: all that this process starts, or the number its launcher passes in
/// the environment.
pub(crate) fn ranks_here(options: &RankOptions, world_size: usize) -> usize {
    match LaunchedRank::from_env() {
        Ok(Some(place)) => place.local_world_size.unwrap_or(1).min(world_size),
        _ if options.backend == Backend::Mpi => 1,
        _ => world_size,
    }
}

/// Returns the number of ranks here if their tensors are in this machine's main memory; `None` if they are on GPUs.
pub fn ranks_on_host(options: &RankOptions, device: DeviceKind, world_size: usize) -> Option<usize> {
    let on_host = match device {
        // Apple's GPUs share the main memory.
        DeviceKind::Cpu | DeviceKind::Metal => true,
        DeviceKind::Cuda => false,
        DeviceKind::Auto => options.backend == Backend::Mpi || devices::check_cuda().is_err(),
    };
    on_host.then(|| ranks_here(options, world_size))
}

/// Checks that `samples` of `bytes` each fit in memory, given that each rank holds all of them. With `--data` nothing is
/// checked: the samples come from the file.
///
/// # Errors
/// The option, if they do not fit.
pub fn check_samples(
    option: &'static str,
    samples: usize,
    bytes: usize,
    common: &CommonOptions,
    world_size: usize,
) -> Result<()> {
    if common.data.is_some() {
        return Ok(());
    }
    check_data(option, samples, samples as f64 * bytes as f64, ranks_here(&common.ranks, world_size))
}

/// Checks that `bytes` of data on each of `ranks` ranks fit in this machine's memory.
///
/// # Errors
/// The option, if they do not fit.
pub fn check_data(option: &'static str, got: usize, bytes: f64, ranks: usize) -> Result<()> {
    let what = if ranks == 1 { "it takes".to_string() } else { format!("the {ranks} ranks here take") };
    match total_memory().and_then(|there_is| shortage(&there_is, bytes * ranks as f64)) {
        None => Ok(()),
        Some((needed, there_is)) => {
            let help = format!("{what} {needed} GiB for that, and this machine has {there_is}: give less");
            refuse(option, got, help)
        }
    }
}

/// Returns the message for a model of `count` parameters (`what`) that does not fit, given that each of `ranks` ranks
/// here needs at least `bytes`; `None` if it fits. Computed in floats, which do not overflow whatever sizes are
/// typed.
pub fn too_large(count: f64, what: &str, bytes: f64, ranks: usize) -> Option<String> {
    total_memory().and_then(|there_is| too_large_for(&there_is, count, what, bytes, ranks))
}

/// Returns the option to blame for a model's size, with its value: the one whose reduction to 1 makes the model
/// smallest. `count` computes the number of parameters for given sizes.
pub fn option_to_blame<const N: usize>(
    options: [(&'static str, usize); N],
    count: impl Fn([f64; N]) -> f64,
) -> (&'static str, usize) {
    let without = |at: usize| {
        let mut sizes = options.map(|(_, size)| size as f64);
        sizes[at] = 1.0;
        count(sizes)
    };
    let at = (0..N).min_by(|&a, &b| without(a).total_cmp(&without(b)));
    at.map_or(("the sizes", 0), |at| options[at])
}

/// Checks that the model of these sizes fits: `count` computes its parameters, and each of `ranks` ranks here needs at
/// least `bytes(parameters)`.
///
/// # Errors
/// The option to blame for its size, see [`option_to_blame`].
pub fn check_model<const N: usize>(
    sizes: [(&'static str, usize); N],
    count: impl Fn([f64; N]) -> f64,
    needed: impl FnOnce(f64) -> (f64, usize),
) -> Result<()> {
    let parameters = count(sizes.map(|(_, size)| size as f64));
    let (bytes, ranks) = needed(parameters);
    match too_large(parameters, "parameters", bytes, ranks) {
        None => Ok(()),
        Some(help) => {
            let (option, got) = option_to_blame(sizes, count);
            refuse(option, got, help)
        }
    }
}

/// [`too_large`] where there is so much memory.
fn too_large_for(
    there_is: &UsableMemory,
    count: f64,
    what: &str,
    bytes: f64,
    ranks: usize,
) -> Option<String> {
    let (needed, there_is) = shortage(there_is, bytes * ranks as f64)?;
    let ranks = if ranks == 1 { String::new() } else { format!(" on the {ranks} ranks here") };
    Some(format!(
        "with the other sizes that makes {count:.1e} {what}, {needed} GiB{ranks}, and this machine has {there_is}: make the \
         model smaller"
    ))
}

/// Returns the GiB needed, and the GiB present with what limits them, formatted, if there are too few.
fn shortage(there_is: &UsableMemory, bytes: f64) -> Option<(String, String)> {
    let (needed, present) = (bytes / GIB, there_is.bytes as f64 / GIB);
    let shown = |gib: f64| match gib {
        gib if gib < 10.0 => format!("{gib:.2}"),
        gib if gib < 1e6 => format!("{gib:.0}"),
        gib => format!("{gib:.1e}"),
    };
    (needed > present).then(|| (shown(needed), format!("{} GiB{}", shown(present), there_is.restriction())))
}

/// Returns the bytes of one rank's f32 parameters with Adam's two moments each, if they are divided into `parts`.
pub fn with_adam(parameters: f64, parts: usize) -> f64 {
    3.0 * 4.0 * parameters / parts.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gib() -> UsableMemory {
        UsableMemory { bytes: 1 << 30, limit: None }
    }

    #[test]
    fn a_limit_of_memory_is_named() {
        let limit = Some("/sys/fs/cgroup/memory/job/memory.limit_in_bytes".into());
        let (needed, there_is) = shortage(&UsableMemory { bytes: 256 << 20, limit }, 1e9).unwrap();
        assert_eq!(needed, "0.93");
        let expected = "0.25 GiB for this container or job (/sys/fs/cgroup/memory/job/memory.limit_in_bytes)";
        assert_eq!(there_is, expected);
    }

    #[test]
    fn what_has_no_room_is_told_in_one_line() {
        assert_eq!(too_large_for(&gib(), 1e6, "parameters", 4e6, 200), None);
        let line = too_large_for(&gib(), 1e12, "parameters", with_adam(1e12, 4), 1).unwrap();
        assert!(line.contains("1.0e12 parameters, 2794 GiB, and this machine has 1.00 GiB: make"), "{line}");
        let huge = too_large_for(&gib(), f64::MAX, "parameters", f64::INFINITY, 4096).unwrap();
        assert!(huge.len() < 250, "{huge}");
    }

    #[test]
    fn the_size_to_blame_is_the_one_that_makes_it_large() {
        let count = |[rows, width]: [f64; 2]| rows * width + 12.0 * width * width;
        assert_eq!(option_to_blame([("rows", 1 << 40), ("width", 12)], count), ("rows", 1 << 40));
        assert_eq!(option_to_blame([("rows", 100), ("width", 1 << 20)], count), ("width", 1 << 20));
    }

    #[test]
    fn all_ranks_of_a_machine_count() {
        let part = with_adam(1e8, 2);
        assert_eq!(too_large_for(&gib(), 1e8, "parameters", part, 1), None);
        let line = too_large_for(&gib(), 1e8, "parameters", part, 2).unwrap();
        assert!(line.contains("1.12 GiB on the 2 ranks here, and this machine has 1.00 GiB: make"), "{line}");
        assert_eq!(shortage(&gib(), 1e300).unwrap().0, "9.3e290");
    }
}
