//! Options shared by all experiments: ranks, backend, device, precision, files.

pub(crate) mod begin_note;
mod checkpoints;
mod elastic;
mod files;
mod loader;
mod lora;
mod resume_note;

use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::Device;
use clap::builder::{EnumValueParser, PossibleValue, TypedValueParser};
use clap::{Args, ValueEnum};
use comm::InitMethod;
use ops::Precision;
use report::fact;
use training::FileHash;

use crate::console::note;
use crate::devices;
use crate::error::Error;
use crate::settings;

pub use checkpoints::{CheckpointOptions, UserSignal};
pub(crate) use checkpoints::{keeps_losses, with_fallback_hint};
pub use elastic::ElasticOptions;
pub(crate) use files::{check_input, read_text};
pub use launch::command::{ElasticRanks, TransportOption, count, learning_rate, probability, seconds, seed};
pub use loader::{LoaderOptions, workers};
pub(crate) use lora::{check_once, check_rank};

/// How `--init` is described in a run's settings if no file is given.
pub(crate) const NO_INIT: &str = "random weights";

/// Backend of communication between ranks.
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

/// Device of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// CUDA where this build and this machine have it, the CPU otherwise.
    Auto,
    /// The CPU.
    Cpu,
    /// One CUDA device a rank.
    Cuda,
    /// Apple's GPU.
    Metal,
}

impl DeviceKind {
    /// Returns the device of a process.
    ///
    /// # Errors
    /// A device that this build or this machine does not have.
    pub fn device(self) -> Result<Device, Error> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => devices::cuda(),
            Self::Metal => devices::metal(),
            Self::Auto => Ok(devices::any()),
        }
    }
}

/// How exactly matrix products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrecisionOption {
    /// Products of f32.
    F32,
    /// Each product as three of bf16, on processors with a matrix unit for it.
    F32High,
    /// Products of bf16, summed in f32; parameters and everything else stay f32.
    Bf16,
}

impl From<PrecisionOption> for Precision {
    fn from(option: PrecisionOption) -> Self {
        match option {
            PrecisionOption::F32 => Self::F32,
            PrecisionOption::F32High => Self::F32High,
            PrecisionOption::Bf16 => Self::Bf16,
        }
    }
}

impl PrecisionOption {
    /// Says on standard error how this machine computes such products, unless that is the usual way.
    pub(crate) fn note_products(self, device: DeviceKind) {
        if self != Self::F32 {
            note(format_args!("matrix products are computed {}", self.products(device)));
        }
    }

    fn products(self, device: DeviceKind) -> &'static str {
        let has_gpu = cfg!(feature = "cuda") && launch::machine::gpu_count() > 0;
        match (self, device) {
            (Self::Bf16, DeviceKind::Auto | DeviceKind::Cuda) if has_gpu => "in bf16, by the GPU",
            (_, DeviceKind::Auto | DeviceKind::Cuda) if has_gpu => "in f32, by the GPU",
            (_, DeviceKind::Metal) => "in f32, by the GPU",
            (precision, _) => Precision::from(precision).products(),
        }
    }
}

/// Options of every command that has ranks.
#[derive(Debug, Clone, Args)]
pub struct RankOptions {
    /// Ranks [default: from the environment, or the command's]
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Ranks")]
    pub world_size: Option<usize>,
    /// Backend of communication between ranks
    #[arg(long, value_parser = BackendParser, default_value = "auto", help_heading = "Ranks")]
    pub backend: Backend,
    /// What carries data between ranks of one host.
    #[command(flatten)]
    pub transport: TransportOption,
    /// Where ranks meet: env://, tcp://HOST:PORT or file:///PATH [default: GIRANDOLE_INIT_METHOD, else env://]
    #[arg(long, value_name = "METHOD", help_heading = "Ranks")]
    pub init_method: Option<InitMethod>,
    /// How long ranks wait for each other [default: 300]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Ranks")]
    pub timeout: Option<Duration>,
    /// How long ranks may take to end after a signal [default: 30]
    ///
    /// Then they are killed.
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Ranks")]
    pub grace: Option<Duration>,
}

/// Parses a [`Backend`]; PyTorch's `gloo` is rejected with a hint to use `tcp`.
#[derive(Debug, Clone)]
struct BackendParser;

impl TypedValueParser for BackendParser {
    type Value = Backend;

    fn parse_ref(
        &self,
        command: &clap::Command,
        option: Option<&clap::Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<Backend, clap::Error> {
        if value.eq_ignore_ascii_case("gloo") {
            let refuse = |_: &str| Err::<Backend, _>("Gloo is PyTorch's back end for the CPU: use tcp");
            return refuse.parse_ref(command, option, value);
        }
        EnumValueParser::new().parse_ref(command, option, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(Backend::value_variants().iter().filter_map(ValueEnum::to_possible_value)))
    }
}

impl RankOptions {
    /// Whether the options allow ranks to communicate over TCP.
    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.backend, Backend::Auto | Backend::Tcp)
    }

    /// Checks that the device exists, without opening it (except for Metal): an opened device keeps some memory.
    ///
    /// # Errors
    /// A device that does not exist here.
    pub fn check_device(&self, kind: DeviceKind) -> Result<(), Error> {
        match kind {
            DeviceKind::Cuda => devices::check_cuda(),
            DeviceKind::Metal => devices::metal().map(drop),
            DeviceKind::Auto if self.backend == Backend::Nccl => devices::check_cuda(),
            DeviceKind::Cpu | DeviceKind::Auto => Ok(()),
        }
    }

    /// Returns the device of this process's tensors. NCCL requires CUDA, and MPI is used here with the CPU only.
    ///
    /// # Errors
    /// A device that does not exist here.
    pub fn device(&self, kind: DeviceKind) -> Result<Device, Error> {
        match kind {
            DeviceKind::Auto if self.backend == Backend::Nccl => devices::cuda(),
            DeviceKind::Auto if self.backend == Backend::Mpi => Ok(Device::Cpu),
            kind => kind.device(),
        }
    }
}

/// Options of every experiment.
#[derive(Debug, Clone, Args)]
pub struct CommonOptions {
    /// How its ranks come together.
    #[command(flatten)]
    pub ranks: RankOptions,
    /// Device of tensors
    #[arg(long, value_enum, default_value = "auto", help_heading = "Ranks")]
    pub device: DeviceKind,
    /// Seed of data and initial weights
    #[arg(long, value_name = "N", default_value = "42", value_parser = seed)]
    pub seed: u64,
    /// Matrix products of f32
    #[arg(long, value_enum, default_value = "f32")]
    pub precision: PrecisionOption,
    /// Initial weights under PyTorch's names, in place of random ones
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Files")]
    pub init: Option<PathBuf>,
    /// Data, in place of random data
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Files")]
    pub data: Option<PathBuf>,
    /// File to save the trained weights to
    #[arg(long, value_name = "FILE.safetensors", help_heading = "Files")]
    pub save: Option<PathBuf>,
    /// File for the loss of each step, one JSON object per line
    #[arg(long, value_name = "FILE.jsonl", help_heading = "Files")]
    pub metrics: Option<PathBuf>,
    /// File for a timeline of all ranks: a Chrome trace, which Perfetto opens
    #[arg(long, value_name = "FILE.json", help_heading = "Files")]
    pub trace: Option<PathBuf>,
    /// File for plots of the run, one self-contained HTML page
    #[arg(long, value_name = "FILE.html", help_heading = "Files")]
    pub report: Option<PathBuf>,
}

impl CommonOptions {
    /// Returns the line of a report about the data: the file of `--data`, or how many samples are drawn.
    pub fn data_fact(&self, samples: usize) -> (String, String) {
        match &self.data {
            Some(path) => fact("data", path.display()),
            None => fact("samples", samples),
        }
    }

    /// Checks what can be checked before any work: that the device exists, and that output files can be written.
    ///
    /// # Errors
    /// The first option that cannot be used.
    pub fn check(&self) -> Result<(), Error> {
        self.ranks.check_device(self.device)?;
        self.check_files()
    }

    /// Returns the device of this process's tensors.
    ///
    /// # Errors
    /// A device that does not exist here.
    pub fn device(&self) -> Result<Device, Error> {
        self.ranks.device(self.device)
    }

    /// Returns the settings that must be unchanged when a run is resumed, for [`RunIdentity`]. Data and initial
    /// weights are identified by the hash of the file's content, wherever the file is; it is only read for that if
    /// `checkpoints` are kept.
    ///
    /// [`RunIdentity`]: crate::trainer::RunIdentity
    pub fn settings(&self, checkpoints: Option<&CheckpointOptions>) -> Vec<(String, String)> {
        let is_kept = checkpoints.is_some_and(CheckpointOptions::keeps);
        let file = |path: &Option<PathBuf>, none: &str| match path {
            None => none.into(),
            Some(path) if is_kept => contents_of("a file", [path]),
            Some(_) => "a file".into(),
        };
        let (data, init) = (file(&self.data, "random data"), file(&self.init, NO_INIT));
        settings!(self, seed, data = data, init = init, precision = value_name(&self.precision))
    }
}

/// Returns the option of a field: `--batch-size` of `batch_size`.
pub fn option_of_field(field: &str) -> String {
    format!("--{}", field.replace('_', "-"))
}

/// Returns the name of an option's value, as given on the command line.
pub fn value_name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
}

/// Describes the content of files for messages and comparison: `what`, then their SHA-256.
pub fn contents_of(what: &str, files: impl IntoIterator<Item = impl AsRef<Path>>) -> String {
    let one = |file: &Path| FileHash::of(file).map_or_else(|error| error.to_string(), |hash| hash.sha256);
    let all: Vec<String> = files.into_iter().map(|file| one(file.as_ref())).collect();
    format!("{what} with SHA-256 {}", all.join(", "))
}
