//! `plan` as a command: its options, the model and the training that they describe.

mod language;
mod model;
mod names;

use std::path::PathBuf;

use clap::Args;
use comm::internal::total_memory;
use comm::{Error, Result};
use launch::command::{count, probability};

use crate::{Optimizer, RankMemory, units};

pub use language::{LanguagePlanOptions, ParametersDtype, base_format, pattern, recompute, schedule};
pub use model::check_heads;
pub use names::{ModelName, NetworkName};

/// Options of `plan`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Prints for each layout of a model over --ranks ranks: whether it fits; the memory of the rank that
needs most, by kind; the bytes that a rank sends in a step; and the approximate time of a step. Values
that you do not give are measured on this machine, between two processes.

`fsdp 4 grad-op` keeps parameters from forward to backward. `fsdp 2, dp 2` shards the model over 2
ranks, and has 2 copies of that. A pipeline has stages with about equally many parameters, and all
micro-batches go forward before the first one goes backward.

Each copy of the model takes its own samples, so a step needs at least one sample per copy. Layouts
that are impossible, because the ranks do not divide the sizes of the model, are listed below the
table with the reason.

--json FILE gets one object: model, ranks, memory, bandwidth and so on; strategies, a list with
whether each fits, what it lacks if it does not (samples or memory), the bytes of each kind, the bytes
sent, and seconds; left_out, the impossible ones with the reason; recommended, the name of one, or
null. An experiment with --metrics writes the measured bytes of the same kinds to its last line. With
--model the object has layouts in place of strategies, each with its stages, and ruled_out.

With --model the plan is for a language model as pretrain and finetune train it, in the layout --mesh
or in every layout of --ranks ranks, sorted by the memory of the rank that needs most. It includes the
activations of all micro-batches in flight; `buffers` are copies, gathered units, messages, and the
temporary memory of an operation. It is an estimate, within about a tenth. Each process takes about
100 MB more. The layout that is recommended is the quickest one that fits.

Without --model the sizes are those of a command's model, changed by options. The time consists of
matrix products (--flops), the optimizer (--memory-bandwidth), and communication, computed message by
message for a network with --bandwidth and --latency between ranks, or one known by name (--network).
If nodes have several ranks and slower links between them, give --ranks-per-node, --node-bandwidth and
--node-latency. Computation and communication overlap, except on a measured machine with fewer than
two cores per rank.

  girandole plan fsdp-mlp --ranks 4 --memory 16GB --network nvlink --flops 80TFLOP/s
  girandole plan --model SmolLM2-135M --ranks 4")]
pub struct PlanOptions {
    /// Model of this command
    #[arg(value_enum, default_value = "tensor-parallel-transformer")]
    pub model: ModelName,
    /// Number of ranks
    #[arg(long, value_name = "N", default_value = "2", value_parser = count)]
    pub ranks: usize,
    /// Memory of a rank, such as 16GB [default: what is here / ranks]
    ///
    /// Here is this machine, or its container or the scheduler's job, if that has less.
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, allow_hyphen_values = true)]
    pub memory: Option<f64>,
    /// Bandwidth of a rank [default: measured]
    ///
    /// Such as 100Gbit/s.
    #[arg(long, value_name = "BYTES/s", value_parser = units::bandwidth, allow_hyphen_values = true)]
    pub bandwidth: Option<f64>,
    /// Latency of a message [default: measured]
    ///
    /// Such as 50us.
    #[arg(long, value_name = "TIME", value_parser = units::time, allow_hyphen_values = true)]
    pub latency: Option<f64>,
    /// Network, in place of bandwidth and latency
    #[arg(long, value_enum, conflicts_with_all = ["bandwidth", "latency", "node_bandwidth", "node_latency"])]
    pub network: Option<NetworkName>,
    /// Ranks per node [default: --network's, or all]
    #[arg(long, value_name = "N", value_parser = count)]
    pub ranks_per_node: Option<usize>,
    /// Between nodes [default: --bandwidth]
    ///
    /// Bandwidth of a rank to other nodes.
    #[arg(long, value_name = "BYTES/s", value_parser = units::bandwidth, allow_hyphen_values = true, requires = "ranks_per_node")]
    pub node_bandwidth: Option<f64>,
    /// Between nodes [default: --latency]
    ///
    /// Latency of a message to other nodes.
    #[arg(long, value_name = "TIME", value_parser = units::time, allow_hyphen_values = true, requires = "ranks_per_node")]
    pub node_latency: Option<f64>,
    /// Speed of a rank [default: measured]
    ///
    /// Such as 80GFLOP/s.
    #[arg(long, value_name = "FLOP/s", value_parser = units::flops, allow_hyphen_values = true)]
    pub flops: Option<f64>,
    /// Memory bandwidth of a rank [default: measured]
    ///
    /// Such as 20GB/s: the optimizer's traffic. It is measured together with bandwidth, latency and operations; if those are all given, the optimizer is taken to need no time.
    #[arg(long, value_name = "BYTES/s", value_parser = units::bandwidth, allow_hyphen_values = true)]
    pub memory_bandwidth: Option<f64>,
    /// Samples per step [default: 16; 8 with --model]
    ///
    /// Over all ranks.
    #[arg(long, value_name = "N", value_parser = count)]
    pub batch_size: Option<usize>,
    /// Micro-batches of a pipeline
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub micro_batches: usize,
    /// Optimizer [default: the command's]
    ///
    /// That is adam for fsdp-mlp, tensor-parallel-mlp and tensor-parallel-transformer, and sgd for the others.
    #[arg(long, value_enum)]
    pub optimizer: Option<Optimizer>,
    /// Bytes of a number
    ///
    /// Such as 2 for f16 and bf16.
    #[arg(long, value_name = "N", default_value = "4", value_parser = count)]
    pub element_bytes: usize,
    /// The same for FSDP [default: --element-bytes]
    ///
    /// Bytes of a number that FSDP gathers. It is 2 for the default of `fsdp-mlp`, f16.
    #[arg(long, value_name = "N", value_parser = count)]
    pub gathered_bytes: Option<usize>,
    /// File to write the plan to, as JSON
    #[arg(long, value_name = "FILE.json")]
    pub json: Option<PathBuf>,
    /// A language model's own.
    #[command(flatten)]
    pub language: LanguagePlanOptions,
    /// Sizes of a chain of linear layers, separated by commas
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = count, help_heading = "Model")]
    pub sizes: Vec<usize>,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub vocab_size: Option<usize>,
    /// Features of a token
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub d_model: Option<usize>,
    /// Attention heads
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub num_heads: Option<usize>,
    /// Width of the feed-forward layers
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub d_ff: Option<usize>,
    /// Layers
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub num_layers: Option<usize>,
    /// Positions: the longest row that the model takes
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub max_len: Option<usize>,
    /// Tokens in a row; the last one is only predicted
    #[arg(long, value_name = "N", value_parser = count, help_heading = "Model")]
    pub length: Option<usize>,
    /// Dropout [default: the command's]
    ///
    /// Above 0 its results take memory.
    #[arg(long, value_name = "P", value_parser = probability, help_heading = "Model")]
    pub dropout: Option<f64>,
}

/// Maximum of a size. Products of several may still overflow: see [`SizeBounds`](crate::extent::SizeBounds).
const LARGEST: usize = 1 << 24;
/// Maximum number of micro-batches, since a schedule has an entry for each on each stage.
const MOST_MICRO_BATCHES: usize = 1 << 12;

impl PlanOptions {
    /// Returns a rank's memory: as given, or its share of this machine's, or of what a container or job has of that.
    pub fn memory(&self, ranks: usize) -> RankMemory {
        match (self.memory, total_memory()) {
            (None, Some(total)) => RankMemory::share(&total, ranks),
            (given, _) => RankMemory { bytes: given.unwrap_or_default(), limit: String::new() },
        }
    }

    /// Returns the batch size: as given, or the default of the experiments, or that of `pretrain` and `finetune`.
    pub fn batch_size(&self) -> usize {
        self.batch_size.unwrap_or(if self.language.folder.is_some() { 8 } else { 16 })
    }

    /// Returns the optimizer: as given, or the command's.
    pub fn optimizer(&self) -> Optimizer {
        let own = match self.model {
            ModelName::FsdpMlp | ModelName::TensorParallelMlp | ModelName::TensorParallelTransformer => {
                Optimizer::Adam
            }
            ModelName::DdpLinear | ModelName::DdpTrainer | ModelName::DdpMlp | ModelName::DdpTransformer => {
                Optimizer::Sgd
            }
        };
        self.optimizer.unwrap_or(own)
    }

    /// Checks the ranges of numbers.
    ///
    /// # Errors
    /// The first option that cannot be used.
    pub fn check(&self) -> Result<()> {
        let most = |option, got: usize, most: usize| match got > most {
            true => refuse(option, got, format!("give at most {most}")),
            false => Ok(()),
        };
        most("--ranks", self.ranks, 1 << 20)?;
        most("--batch-size", self.batch_size(), LARGEST)?;
        most("--micro-batches", self.micro_batches, MOST_MICRO_BATCHES)?;
        let bytes = |option, got: usize| match got {
            2 | 4 | 8 => Ok(()),
            got => refuse(option, got, "give 2, 4 or 8".into()),
        };
        if self.optimizer == Some(Optimizer::Muon) && self.language.folder.is_none() {
            let help = "it is for the matrices of a language model: give --model DIR, or another optimizer";
            return Err(Error::invalid("--optimizer", "muon", help.to_string()));
        }
        bytes("--element-bytes", self.element_bytes)?;
        self.gathered_bytes.map_or(Ok(()), |got| bytes("--gathered-bytes", got))
    }
}

fn refuse<T>(option: &'static str, got: usize, help: String) -> Result<T> {
    Err(Error::invalid(option, got, help))
}
