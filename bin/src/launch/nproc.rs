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
    gpus(Path::new("/proc/driver/nvidia/gpus"), visible.as_deref())
}

/// GPUs of NVIDIA's driver that a program may use: those that it shows, of which the variable names some.
fn gpus(driver: &Path, visible: Option<&str>) -> usize {
    let present = std::fs::read_dir(driver).map_or(0, |entries| entries.flatten().count());
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
    fn gpus_are_those_of_the_driver_that_may_be_seen() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["0000:01:00.0", "0000:02:00.0"] {
            std::fs::create_dir(folder.path().join(name)).unwrap();
        }
        for (visible, expected) in [
            (None, 2),
            (Some("0"), 1),
            (Some("1,0"), 2),
            (Some(""), 0),
            (Some("-1"), 0),
            (Some("1,7,0"), 1),
            (Some("GPU-8932f937"), 1),
        ] {
            assert_eq!(gpus(folder.path(), visible), expected, "{visible:?}");
        }
        assert_eq!(gpus(&folder.path().join("none"), Some("0")), 0);
    }
}
