//! Memory limits of control groups (cgroups), in which containers and the jobs of a scheduler run. The limits of a group's
//! ancestors hold for it, too.
//!
//! # Source
//! proc(5), cgroups(7); the kernel's documents `cgroup-v1/memory` and `cgroup-v2`.

use std::path::{Component, Path, PathBuf};

/// Names of a cgroup's files, and of lines in its `memory.stat`.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Memory that is used, and that the system takes back where processes need it.
    reclaimable: &'static [&'static str],
    /// The limit that results from those of all ancestors, also of those that a container does not see.
    inherited: Option<&'static str>,
}

const STAT: &str = "memory.stat";
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    reclaimable: &["total_inactive_file", "total_active_file"],
    inherited: Some("hierarchical_memory_limit"),
};
const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    reclaimable: &["inactive_file", "active_file", "slab_reclaimable"],
    inherited: None,
};

/// One limit on this process's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Limit {
    /// The limit, in bytes.
    pub(super) bytes: u64,
    /// What is left of it.
    pub(super) available: u64,
    /// The file that has it.
    pub(super) file: PathBuf,
}

/// Returns the limits of this process's cgroup and of its ancestors.
pub(super) fn limits() -> Vec<Limit> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let texts =
        ["/proc/self/cgroup", "/proc/self/mountinfo"].map(|path| read(path.as_ref()).unwrap_or_default());
    limits_in(&texts[0], &texts[1], read)
}

/// [`limits`], given the contents of `/proc/self/cgroup` and `/proc/self/mountinfo`, and of the files that they lead to.
fn limits_in(cgroup: &str, mountinfo: &str, read: impl Fn(&Path) -> Option<String>) -> Vec<Limit> {
    let directories = directories(cgroup, mountinfo);
    let own = directories.iter().filter_map(|(directory, files)| {
        let file = directory.join(files.limit);
        limit(read(&file)?.trim().parse().ok()?, file, directory, files, &read)
    });
    let inherited = directories.iter().filter_map(|(directory, files)| {
        let file = directory.join(STAT);
        limit(number(&read(&file)?, files.inherited?)?, file, directory, files, &read)
    });
    own.chain(inherited).collect()
}

fn limit(
    bytes: u64,
    file: PathBuf,
    directory: &Path,
    files: &Files,
    read: impl Fn(&Path) -> Option<String>,
) -> Option<Limit> {
    let usage: u64 = read(&directory.join(files.usage))?.trim().parse().ok()?;
    let stat = read(&directory.join(STAT)).unwrap_or_default();
    let reclaimable: u64 = files.reclaimable.iter().filter_map(|name| number(&stat, name)).sum();
    Some(Limit { bytes, available: bytes.saturating_sub(usage.saturating_sub(reclaimable)), file })
}

/// Returns the number in a line `name number`.
fn number(lines: &str, name: &str) -> Option<u64> {
    let line = lines.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
    line.trim().parse().ok()
}

/// Returns the directories of this process's cgroup and of its ancestors, the innermost first, in each mounted hierarchy that
/// may limit memory. Where both versions are mounted, only one has files for memory.
fn directories(cgroup: &str, mountinfo: &str) -> Vec<(PathBuf, &'static Files)> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((files, root, mount)) = memory_mount(line) else { continue };
        let Some(path) = path_of(cgroup, files) else { continue };
        // A path outside of the mounted part is one of another container: its own is all that is mounted.
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let is_below = below.components().all(|component| matches!(component, Component::Normal(_)));
        let below = if is_below { below } else { Path::new("") };
        found.extend(below.ancestors().map(|directory| (Path::new(&mount).join(directory), files)));
    }
    found
}

/// Returns the version, the root and the mount point of a hierarchy in this line of `mountinfo`, if it may limit memory.
fn memory_mount(line: &str) -> Option<(&'static Files, String, String)> {
    let (mount, system) = line.split_once(" - ")?;
    let mut system = system.split(' ');
    let files = match (system.next()?, system.nth(1)?) {
        ("cgroup2", _) => &V2,
        ("cgroup", options) if options.split(',').any(|option| option == "memory") => &V1,
        _ => return None,
    };
    let mut mount = mount.split(' ').skip(3);
    Some((files, unescaped(mount.next()?), unescaped(mount.next()?)))
}

/// Returns the path of this process's cgroup in the hierarchy of this version.
fn path_of<'a>(cgroup: &'a str, files: &Files) -> Option<&'a str> {
    cgroup.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next()?;
        let is_it = match *files == V2 {
            true => controllers.is_empty(),
            false => controllers.split(',').any(|name| name == "memory"),
        };
        parts.next().filter(|_| is_it)
    })
}

/// Undoes the escapes of `mountinfo`: `\040` is a space.
fn unescaped(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .into_iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_string(), |text, (escape, character)| text.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNLIMITED: &str = "9223372036854771712\n";

    /// The limits as (bytes, available, file), the lowest first.
    fn found(cgroup: &str, mountinfo: &str, files: &[(&str, &str)]) -> Vec<(u64, u64, String)> {
        let read = |path: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == path)?;
            Some(file.1.to_string())
        };
        let mut limits: Vec<_> = limits_in(cgroup, mountinfo, read)
            .into_iter()
            .map(|limit| (limit.bytes, limit.available, limit.file.display().to_string()))
            .collect();
        limits.sort();
        limits
    }

    #[test]
    fn version_1_and_all_ancestors_count() {
        let cgroup =
            "11:memory:/slurm/uid_1000/job_7\n10:cpu,cpuacct:/slurm\n1:name=systemd:/a:b\n0::/system.slice\n";
        let mountinfo = "25 20 0:22 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
            36 25 0:33 / /sys/fs/cgroup/memory rw,nosuid shared:12 - cgroup cgroup rw,memory\n";
        let files = [
            ("/sys/fs/cgroup/memory/slurm/uid_1000/job_7/memory.limit_in_bytes", UNLIMITED),
            ("/sys/fs/cgroup/memory/slurm/uid_1000/job_7/memory.usage_in_bytes", "1000\n"),
            (
                "/sys/fs/cgroup/memory/slurm/uid_1000/job_7/memory.stat",
                "inactive_file 1\ntotal_inactive_file 200\nhierarchical_memory_limit 5000\n",
            ),
            ("/sys/fs/cgroup/memory/slurm/uid_1000/memory.limit_in_bytes", "5000\n"),
            ("/sys/fs/cgroup/memory/slurm/uid_1000/memory.usage_in_bytes", "3000\n"),
            (
                "/sys/fs/cgroup/memory/slurm/uid_1000/memory.stat",
                "cache 9\ntotal_inactive_file 700\ntotal_active_file 300\n",
            ),
        ];
        let limits = found(cgroup, mountinfo, &files);
        let inner = "/sys/fs/cgroup/memory/slurm/uid_1000/job_7/";
        assert_eq!(
            limits,
            [
                (5000, 3000, "/sys/fs/cgroup/memory/slurm/uid_1000/memory.limit_in_bytes".to_string()),
                (5000, 4200, format!("{inner}memory.stat")),
                (9223372036854771712, 9223372036854770912, format!("{inner}memory.limit_in_bytes")),
            ]
        );
    }

    #[test]
    fn version_2_and_all_ancestors_count() {
        let cgroup = "0::/kubepods.slice/pod3/abc\n";
        let mountinfo = "24 1 0:20 / / rw - ext4 /dev/sda1 rw\n\
            35 24 0:31 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let files = [
            ("/sys/fs/cgroup/kubepods.slice/pod3/abc/memory.max", "max\n"),
            ("/sys/fs/cgroup/kubepods.slice/pod3/abc/memory.current", "10\n"),
            ("/sys/fs/cgroup/kubepods.slice/pod3/memory.max", "4096\n"),
            ("/sys/fs/cgroup/kubepods.slice/pod3/memory.current", "5096\n"),
            (
                "/sys/fs/cgroup/kubepods.slice/pod3/memory.stat",
                "anon 7\ninactive_file 1100\nactive_file 90\nslab_reclaimable 6\n",
            ),
            ("/sys/fs/cgroup/kubepods.slice/memory.max", "8192\n"),
            ("/sys/fs/cgroup/kubepods.slice/memory.current", "8000\n"),
        ];
        assert_eq!(
            found(cgroup, mountinfo, &files),
            [
                (4096, 196, "/sys/fs/cgroup/kubepods.slice/pod3/memory.max".to_string()),
                (8192, 192, "/sys/fs/cgroup/kubepods.slice/memory.max".to_string()),
            ]
        );
    }

    #[test]
    fn a_container_that_sees_only_its_own_cgroup_knows_its_limit() {
        let v2 = "35 24 0:31 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n";
        let files =
            [("/sys/fs/cgroup/memory.max", "268435456\n"), ("/sys/fs/cgroup/memory.current", "1000\n")];
        let limit = [(268435456, 268434456, "/sys/fs/cgroup/memory.max".to_string())];
        // With a cgroup namespace of its own; moved out of it; and a mount from a namespace above.
        assert_eq!(found("0::/\n", v2, &files), limit);
        assert_eq!(found("0::/../other\n", v2, &files), limit);
        assert_eq!(found("0::/\n", &v2.replace(" / ", " /.. "), &files), limit);

        // Docker without a cgroup namespace: the container's part of the hierarchy is mounted.
        let v1 = "36 35 0:33 /docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory\n";
        let files = [
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n"),
            ("/sys/fs/cgroup/memory/memory.stat", "hierarchical_memory_limit 1048576\n"),
            ("/sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "500000\n"),
            ("/sys/fs/cgroup/memory/inner/memory.usage_in_bytes", "600000\n"),
        ];
        let hidden = (1048576, 1047576, "/sys/fs/cgroup/memory/memory.stat".to_string());
        assert_eq!(found("4:memory:/docker/abc\n", v1, &files)[0], hidden);
        let inner = (500000, 0, "/sys/fs/cgroup/memory/inner/memory.limit_in_bytes".to_string());
        assert_eq!(found("4:memory:/docker/abc/inner\n", v1, &files)[..2], [inner, hidden]);
    }

    #[test]
    fn of_both_versions_the_one_with_memory_counts() {
        let cgroup = "4:memory:/job\n0::/job\n";
        let mountinfo = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
            41 31 0:38 / /sys/fs/cgroup/unified\\040two rw - cgroup2 cgroup2 rw\n";
        let v1 = ("/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1000");
        let v2 = ("/sys/fs/cgroup/unified two/job/memory.max", "2000");
        let usage = [
            ("/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1"),
            ("/sys/fs/cgroup/unified two/job/memory.current", "2"),
        ];
        let both = found(cgroup, mountinfo, &[v1, v2, usage[0], usage[1]]);
        assert_eq!(both, [(1000, 999, v1.0.to_string()), (2000, 1998, v2.0.to_string())]);
        assert_eq!(found(cgroup, mountinfo, &[v2, usage[1]]), both[1..]);
        assert_eq!(found("", mountinfo, &[v1, v2]), []);
        assert_eq!(found(cgroup, "", &[v1, v2]), []);
    }
}
