//! How many ranks a machine gets.

use std::path::Path;
use std::str::FromStr;
use std::thread::available_parallelism;

use crate::error::{Error, Result};

/// What `--nproc-per-node` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessCount {
    Number(usize),
    Gpu,
    Cpu,
    Auto,
}

impl FromStr for ProcessCount {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        match text {
            "gpu" => Ok(Self::Gpu),
            "cpu" => Ok(Self::Cpu),
            "auto" => Ok(Self::Auto),
            number => match number.parse() {
                Ok(count) if count > 0 => Ok(Self::Number(count)),
                _ => Err("give a whole number, 1 or more, or gpu, cpu or auto"),
            },
        }
    }
}

impl ProcessCount {
    /// The number on this machine.
    pub(super) fn count(self) -> Result<usize> {
        let cores = || available_parallelism().map_or(1, usize::from);
        match self {
            Self::Number(count) => Ok(count),
            Self::Cpu => Ok(cores()),
            Self::Auto => Ok(Some(gpu_count()).filter(|&gpus| gpus > 0).unwrap_or_else(cores)),
            Self::Gpu => match gpu_count() {
                0 => {
                    let help = "this machine shows no NVIDIA GPU; give a number, or cpu".into();
                    Err(Error::Option { option: "--nproc-per-node", got: "gpu".into(), help })
                }
                gpus => Ok(gpus),
            },
        }
    }
}

/// NVIDIA's GPUs that programs may use here.
pub(crate) fn gpu_count() -> usize {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let present = match entries(Path::new("/proc/driver/nvidia/gpus"), |_| true) {
        // Some containers show the devices alone.
        0 => entries(Path::new("/dev"), is_gpu),
        gpus => gpus,
    };
    gpus(present, visible.as_deref())
}

fn entries(folder: &Path, counts: impl Fn(&str) -> bool) -> usize {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(&counts)).count()
}

/// `nvidia0`, and not `nvidiactl`.
fn is_gpu(device: &str) -> bool {
    let number = device.strip_prefix("nvidia").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// GPUs that a program may use: those that are there, of which the variable names some.
fn gpus(present: usize, visible: Option<&str>) -> usize {
    let Some(visible) = visible else { return present };
    // As CUDA reads it: up to the first one that does not exist.
    let exists = |name: &&str| match name.trim().parse::<i64>() {
        Ok(number) => usize::try_from(number).is_ok_and(|number| number < present),
        Err(_) => name.trim().starts_with("GPU-") || name.trim().starts_with("MIG-"),
    };
    visible.split(',').take_while(exists).count().min(present)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_or_one_of_three_words() {
        assert_eq!("3".parse(), Ok(ProcessCount::Number(3)));
        assert_eq!("auto".parse(), Ok(ProcessCount::Auto));
        for wrong in ["0", "-1", "", "GPU", "two", "1.5", "99999999999999999999"] {
            assert!(wrong.parse::<ProcessCount>().is_err(), "{wrong}");
        }
        assert_eq!(ProcessCount::Number(7).count().unwrap(), 7);
        assert!(ProcessCount::Cpu.count().unwrap() >= 1);
        assert!(ProcessCount::Auto.count().unwrap() >= 1);
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
