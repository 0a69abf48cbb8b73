//! Number of ranks per machine (`--nproc-per-node`).

use std::str::FromStr;
use std::thread::available_parallelism;

use comm::{Error, Result};

use crate::machine::gpu_count;

/// A value of `--nproc-per-node`.
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
    /// Returns the number of ranks on this machine.
    pub(super) fn count(self) -> Result<usize> {
        let cores = || available_parallelism().map_or(1, usize::from);
        match self {
            Self::Number(count) => Ok(count),
            Self::Cpu => Ok(cores()),
            Self::Auto => Ok(Some(gpu_count()).filter(|&gpus| gpus > 0).unwrap_or_else(cores)),
            Self::Gpu => match gpu_count() {
                0 => {
                    let help = "this machine shows no NVIDIA GPU; give a number, or cpu";
                    Err(Error::invalid("--nproc-per-node", "gpu", help))
                }
                gpus => Ok(gpus),
            },
        }
    }
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
}
