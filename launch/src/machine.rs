//! Detection of GPUs and of programs in `PATH` on this machine.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Returns the number of NVIDIA GPUs that this process may use.
pub fn gpu_count() -> usize {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let present = match entries(Path::new("/proc/driver/nvidia/gpus"), |_| true) {
        // Some containers expose only the device files.
        0 => entries(Path::new("/dev"), is_gpu),
        gpus => gpus,
    };
    gpus(present, visible.as_deref())
}

fn entries(folder: &Path, counts: impl Fn(&str) -> bool) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(&counts)).count()
}

/// True for `nvidia0`, false for `nvidiactl`.
fn is_gpu(device: &str) -> bool {
    let number = device.strip_prefix("nvidia").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Returns how many of the `present` GPUs are usable, given the value of `CUDA_VISIBLE_DEVICES`.
fn gpus(present: usize, visible: Option<&str>) -> usize {
    let Some(visible) = visible else { return present };
    // As CUDA reads it: the list ends at the first entry that does not exist.
    let exists = |name: &&str| match name.trim().parse::<i64>() {
        Ok(number) => usize::try_from(number).is_ok_and(|number| number < present),
        Err(_) => name.trim().starts_with("GPU-") || name.trim().starts_with("MIG-"),
    };
    visible.split(',').take_while(exists).count().min(present)
}

/// Returns the first executable file of that name in the folders of `search`.
pub fn in_path(name: &OsStr, search: &OsStr) -> Option<PathBuf> {
    let runs = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    };
    let folders = std::env::split_paths(search);
    folders.filter(|_| !name.is_empty()).map(|folder| folder.join(name)).find(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_in_path_where_it_can_be_run() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| folder.path().join(name));
        for (folder, mode) in [(&first, 0o644), (&second, 0o755)] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("train"), "").unwrap();
            fs::set_permissions(folder.join("train"), fs::Permissions::from_mode(mode)).unwrap();
        }
        let search = std::env::join_paths([&first, &second]).unwrap();
        assert_eq!(in_path("train".as_ref(), &search), Some(second.join("train")));
        assert_eq!(in_path("".as_ref(), &search), None);
        assert_eq!(in_path("other".as_ref(), &search), None);
    }

    #[test]
    fn gpus_are_those_of_the_driver() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia12", "nvidiactl", "nvidia", "nvidia-uvm", "null"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        assert_eq!(entries(folder.path(), |_| true), 6);
        assert_eq!(entries(folder.path(), is_gpu), 2);
        assert_eq!(entries(&folder.path().join("none"), |_| true), 0);
    }

    #[test]
    fn gpus_are_those_that_may_be_seen() {
        for (visible, expected) in [
            (None, 2),
            (Some("0"), 1),
            (Some("1,0"), 2),
            (Some(""), 0),
            (Some("-1"), 0),
            (Some("1,7,0"), 1),
            (Some("GPU-8932f937"), 1),
        ] {
            assert_eq!(gpus(2, visible), expected, "{visible:?}");
        }
        assert_eq!(gpus(0, Some("0")), 0);
    }
}
