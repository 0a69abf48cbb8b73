//! The options that every experiment takes.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::Device;
use clap::{Args, ValueEnum};

use crate::error::{Error, Result};
use crate::weights::check_writable;

/// How ranks talk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// NCCL with CUDA devices, TCP otherwise.
    Auto,
    /// TCP connections; tensors on the CPU.
    Tcp,
    /// NVIDIA's library; tensors on CUDA devices.
    Nccl,
    /// An MPI library.
    Mpi,
}

/// Where tensors are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// CUDA where there is a device, the CPU otherwise.
    Auto,
    /// The CPU.
    Cpu,
    /// One CUDA device a rank.
    Cuda,
}

/// Options of every experiment.
#[derive(Debug, Clone, Args)]
pub struct CommonOptions {
    /// How many ranks take part [default: what the environment says, else the document's]
    #[arg(long, value_name = "N", help_heading = "Ranks")]
    pub world_size: Option<usize>,
    /// How ranks talk
    #[arg(long, value_enum, default_value = "auto", help_heading = "Ranks")]
    pub backend: Backend,
    /// Where tensors are
    #[arg(long, value_enum, default_value = "auto", help_heading = "Ranks")]
    pub device: DeviceKind,
    /// How long the ranks wait for each other [default: 300]
    #[arg(long, value_name = "SECONDS", help_heading = "Ranks")]
    pub timeout: Option<f64>,
    /// Seed of data and initial weights
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Initial weights, in place of random ones, under PyTorch's names
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Files")]
    pub init: Option<PathBuf>,
    /// Data, in place of random data
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Files")]
    pub data: Option<PathBuf>,
    /// Where to save the trained weights
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Files")]
    pub save: Option<PathBuf>,
    /// Where to write the loss of each step, one JSON object a line
    #[arg(long, value_name = "FILE.jsonl", help_heading = "Files")]
    pub metrics: Option<PathBuf>,
    /// Where to write what each rank did when: a Chrome trace, opens in Perfetto
    #[arg(long, value_name = "FILE.json", help_heading = "Files")]
    pub trace: Option<PathBuf>,
    /// Where to write plots of the run, as one self-contained page
    #[arg(long, value_name = "FILE.html", help_heading = "Files")]
    pub report: Option<PathBuf>,
}

/// Refuses a count of 0.
pub(crate) fn at_least_one(option: &'static str, value: usize) -> Result<()> {
    if value == 0 {
        return Err(Error::Option { option, got: "0".into(), help: "give 1 or more".into() });
    }
    Ok(())
}

/// Refuses a learning rate that no step can be taken with.
pub(crate) fn learning_rate(lr: f64) -> Result<()> {
    if !lr.is_finite() || lr < 0.0 {
        return Err(Error::Option {
            option: "--lr",
            got: lr.to_string(),
            help: "give a finite number, 0 or more".into(),
        });
    }
    Ok(())
}

impl CommonOptions {
    /// Checks what can be checked before any work: values, what this build has, and that results can be written.
    ///
    /// # Errors
    /// The first option that cannot be used.
    pub fn check(&self) -> Result<()> {
        if let Some(world_size) = self.world_size {
            at_least_one("--world-size", world_size)?;
        }
        self.timeout()?;
        self.device()?;
        let (wanted, feature) = match self.backend {
            Backend::Auto | Backend::Tcp => return self.check_files(),
            Backend::Nccl => ("--backend nccl", "NCCL"),
            Backend::Mpi => ("--backend mpi", "MPI"),
        };
        let help = format!("this build has no {feature} in it; use --backend tcp");
        Err(Error::Unavailable { wanted: wanted.into(), help })
    }

    fn check_files(&self) -> Result<()> {
        for path in [&self.save, &self.metrics, &self.trace, &self.report].into_iter().flatten() {
            check_writable(path)?;
        }
        Ok(())
    }

    /// The time-out, where one was given.
    ///
    /// # Errors
    /// A number that is no time.
    pub fn timeout(&self) -> Result<Option<Duration>> {
        let Some(seconds) = self.timeout else { return Ok(None) };
        match Duration::try_from_secs_f64(seconds) {
            Ok(timeout) if !timeout.is_zero() => Ok(Some(timeout)),
            _ => {
                let help = "give a number of seconds greater than 0".into();
                Err(Error::Option { option: "--timeout", got: seconds.to_string(), help })
            }
        }
    }

    /// The device of this process's tensors.
    ///
    /// # Errors
    /// CUDA where there is none.
    pub fn device(&self) -> Result<Device> {
        match self.device {
            DeviceKind::Auto | DeviceKind::Cpu => Ok(Device::Cpu),
            DeviceKind::Cuda => Err(Error::Unavailable {
                wanted: "--device cuda".into(),
                help: "this build has no CUDA in it; use --device cpu".into(),
            }),
        }
    }
}
