//! `plan` as a command: its options, the model and the training that they describe.

mod language;
mod rank_memory;

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use comm::internal::total_memory;
use comm::{Error, Result};
use launch::command::{count, probability};

use crate::forecast::Network;
use crate::{MlpLoss, Model, Optimizer, SizeBounds, TransformerSizes, units};

pub use language::{LanguagePlanOptions, ParametersDtype, recompute, schedule};
pub use rank_memory::RankMemory;

/// The model of an experiment, by the command that trains it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Linear(1, 1)
    DdpLinear,
    /// Linear(20, 1)
    DdpTrainer,
    /// Linear 10-20-2
    DdpMlp,
    /// Linear 1024-4096-4096-1024-10
    FsdpMlp,
    /// Linear 1024-4096-1024
    TensorParallelMlp,
    /// The Transformer of the DDP tutorial
    DdpTransformer,
    /// The language model of the PyTorch handbook's layers
    TensorParallelTransformer,
}

/// An optimizer, by the state that it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// It keeps nothing
    Sgd,
    /// It keeps one number per parameter
    Momentum,
    /// It keeps two numbers per parameter
    Adam,
}

impl From<OptimizerName> for Optimizer {
    fn from(name: OptimizerName) -> Self {
        match name {
            OptimizerName::Sgd => Self::Sgd,
            OptimizerName::Momentum => Self::Momentum,
            OptimizerName::Adam => Self::Adam,
        }
    }
}

/// Network between ranks, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NetworkName {
    /// NVLink in nodes of 8 ranks, InfiniBand of 400 Gbit/s a rank between them
    Nvlink,
    /// InfiniBand of 400 Gbit/s a rank
    Infiniband,
    /// Ethernet of 25 Gbit/s a rank
    #[value(name = "ethernet-25g")]
    Ethernet25g,
}

impl NetworkName {
    /// Returns the network.
    pub fn network(self) -> Network {
        match self {
            Self::Nvlink => Network::nvlink(),
            Self::Infiniband => Network::infiniband(),
            Self::Ethernet25g => Network::ethernet_25g(),
        }
    }
}

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
    pub optimizer: Option<OptimizerName>,
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

/// Maximum of a size. Products of several may still overflow: see [`SizeBounds`].
const LARGEST: usize = 1 << 24;
/// Maximum number of layers, since each is a separate part of the plan's model.
const MOST_LAYERS: usize = 1 << 12;
/// Maximum number of micro-batches, since a schedule has an entry for each on each stage.
const MOST_MICRO_BATCHES: usize = 1 << 12;

impl PlanOptions {
    /// Returns the model with its sizes.
    ///
    /// # Errors
    /// Sizes of another kind of model, too large ones, or incompatible ones.
    pub fn model(&self) -> Result<Model> {
        let name = self.model.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
        // Layer sizes, whether there is an activation function between layers, and the loss.
        let (mlp, has_function, loss): (&[u64], bool, MlpLoss) = match self.model {
            ModelName::DdpLinear => (&[1, 1], false, MlpLoss::Squares),
            ModelName::DdpTrainer => (&[20, 1], false, MlpLoss::Squares),
            ModelName::DdpMlp => (&[10, 20, 2], true, MlpLoss::Classes),
            ModelName::FsdpMlp => (&[1024, 4096, 4096, 1024, 10], false, MlpLoss::Classes),
            ModelName::TensorParallelMlp => (&[1024, 4096, 1024], true, MlpLoss::Squares),
            // vocabulary, features, heads, feed-forward width, layers, longest row, row length
            ModelName::DdpTransformer => return self.transformer(&name, [100, 12, 4, 24, 2, 100, 10], false),
            ModelName::TensorParallelTransformer => {
                return self.transformer(&name, [256, 128, 8, 512, 2, 64, 33], true);
            }
        };
        if let Some((option, value)) = self.transformer_options().into_iter().find_map(|(o, v)| Some((o, v?)))
        {
            return refuse(option, value, format!("{name} is made of linear layers: give --sizes"));
        }
        if let Some(dropout) = self.dropout {
            let help = format!("{name} is made of linear layers and has none: leave it out");
            return Err(Error::invalid("--dropout", dropout, help));
        }
        let given: Vec<u64> = self.sizes.iter().map(|size| *size as u64).collect();
        if let [only] = given[..] {
            return refuse("--sizes", only as usize, "a layer has two: give 2 or more".into());
        }
        check_sizes(self.sizes.iter().map(|size| ("--sizes", *size)))?;
        let sizes = if given.is_empty() { mlp } else { &given };
        let widest = sizes.iter().copied().max().unwrap_or(1);
        self.check_extent(SizeBounds::of_layers(sizes), ("--sizes", widest as usize))?;
        Ok(Model::mlp(&name, sizes, has_function, loss))
    }

    fn transformer(&self, name: &str, defaults: [usize; 7], is_modern: bool) -> Result<Model> {
        if let Some(size) = self.sizes.first() {
            return refuse("--sizes", *size, format!("{name} is a transformer: give --d-model and the like"));
        }
        let options = self.transformer_options();
        check_sizes(options.into_iter().filter_map(|(option, size)| Some((option, size?))))?;
        if let Some(layers) = self.num_layers.filter(|layers| *layers > MOST_LAYERS) {
            return refuse("--num-layers", layers, format!("give at most {MOST_LAYERS}"));
        }
        let mut sizes = defaults;
        for (size, (_, given)) in sizes.iter_mut().zip(options) {
            *size = given.unwrap_or(*size);
        }
        if self.d_model.is_some() && self.d_ff.is_none() {
            sizes[3] = 4 * sizes[1];
        }
        if self.length.is_some() && self.max_len.is_none() {
            sizes[5] = sizes[5].max(sizes[6].saturating_sub(1));
        }
        let [_, d_model, num_heads, _, _, max_len, length] = sizes;
        check_heads(d_model, num_heads).or_else(|help| refuse("--d-model", d_model, help))?;
        if length < 2 || length - 1 > max_len {
            let most = max_len + 1;
            return refuse("--length", length, format!("give 2 to {most} tokens with --max-len {max_len}"));
        }
        let [vocab_size, d_model, num_heads, d_ff, num_layers, max_len, length] =
            sizes.map(|size| size as u64);
        let length = length - 1;
        let has_dropout = self.dropout.map_or(!is_modern, |dropout| dropout > 0.0);
        let sizes = TransformerSizes {
            vocab_size,
            d_model,
            num_heads,
            d_ff,
            num_layers,
            max_len,
            length,
            is_modern,
            has_dropout,
        };
        self.check_extent(SizeBounds::of_transformer(&sizes), ("--d-model", d_model as usize))?;
        Ok(Model::transformer(name, &sizes))
    }

    /// Rejects a model or batch too large for any machine; `option` is the one to blame for the model's size.
    fn check_extent(&self, extent: SizeBounds, (option, got): (&'static str, usize)) -> Result<()> {
        extent.check(self.batch_size()).or_else(|error| match error {
            crate::Error::TooManySamples { .. } => {
                refuse("--batch-size", self.batch_size(), error.to_string())
            }
            error => refuse(option, got, error.to_string()),
        })
    }

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
        self.optimizer.map_or(own, Optimizer::from)
    }

    fn transformer_options(&self) -> [(&'static str, Option<usize>); 7] {
        [
            ("--vocab-size", self.vocab_size),
            ("--d-model", self.d_model),
            ("--num-heads", self.num_heads),
            ("--d-ff", self.d_ff),
            ("--num-layers", self.num_layers),
            ("--max-len", self.max_len),
            ("--length", self.length),
        ]
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
        bytes("--element-bytes", self.element_bytes)?;
        self.gathered_bytes.map_or(Ok(()), |got| bytes("--gathered-bytes", got))
    }
}

/// Checks that the attention heads divide the features of a token.
///
/// # Errors
/// What to give.
pub fn check_heads(d_model: usize, num_heads: usize) -> std::result::Result<(), String> {
    if d_model.is_multiple_of(num_heads) {
        return Ok(());
    }
    Err(format!("it is split over {num_heads} heads (--num-heads): give a multiple of that"))
}

fn refuse<T>(option: &'static str, got: usize, help: String) -> Result<T> {
    Err(Error::invalid(option, got, help))
}

fn check_sizes(mut sizes: impl Iterator<Item = (&'static str, usize)>) -> Result<()> {
    match sizes.find(|(_, size)| *size > LARGEST) {
        Some((option, size)) => refuse(option, size, format!("give at most {LARGEST}")),
        None => Ok(()),
    }
}
