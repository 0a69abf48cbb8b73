//! The options of `plan`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use comm::total_memory_bytes;
use plan::forecast::Network;
use plan::{Extent, MlpLoss, Model, Optimizer, TransformerSizes, units};

use crate::error::{Error, Result};
use crate::options::{count, probability};

use super::language::LanguagePlanOptions;

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

/// An optimizer, by what it remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// Nothing
    Sgd,
    /// A number for each parameter
    Momentum,
    /// Two numbers for each parameter
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

/// What lies between ranks, by its name.
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
    pub(super) fn network(self) -> Network {
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
For each way to spread a model over ranks: whether it fits, the memory of the rank that has most
by kind, the bytes that a rank sends in a step, and about how long a step takes. What is not given
is measured here, between two processes.

`fsdp 4 grad-op` keeps parameters from forward to backward; `fsdp 2, dp 2` divides the model over
2 ranks, and has 2 copies of that. A pipeline is cut into stages of about as many parameters, and
all micro-batches go forward before the first one goes back.

Each copy of the model takes samples of its own, so that a step needs as many at least. Ways that
there are not, because sizes of the model cannot be divided by so many ranks, are listed below the
table.

--json FILE gets one object: model, ranks, memory, bandwidth and so on; strategies, a list with
whether each fits, what it lacks where it does not (samples or memory), the bytes of each kind, sent
and seconds; left_out, those that there are not, with the reason; recommended, the name of one, or
null. What a run has measured of the same bytes is in the last line of its --metrics.

With --model a language model of a folder is planned for, as pretrain and finetune train it: for
--mesh, or for every layout of --ranks ranks, the one whose largest rank needs least first. Memory
is that of the rank that needs most, with activations of all micro-batches that are under way;
buffers are copies, gathered units, messages, and what an operation needs for a moment. It is an
estimate, within about a tenth. Each process takes some 100 MB besides.

The sizes are those of a command's model, or what the options say. Time is that of matrix products
at --flops, of the optimizer at --memory-bandwidth, and of communication, message by message as the
ranks exchange them, on a network with --bandwidth and --latency between its ranks, or by its name.
Where nodes have several ranks and less between them, --ranks-per-node says how many, and
--node-bandwidth and --node-latency what. Ranks compute while they communicate; not where the
network is this machine's, measured, and it has less than two cores a rank.")]
pub struct PlanOptions {
    /// The model of a command
    #[arg(value_enum, default_value = "tensor-parallel-transformer")]
    pub(crate) model: ModelName,
    /// Ranks
    #[arg(long, value_name = "N", default_value = "2", value_parser = count, allow_negative_numbers = true)]
    pub(crate) ranks: usize,
    /// Memory of a rank, such as 16GB [default: this machine's, shared by the ranks]
    #[arg(long, value_name = "BYTES", value_parser = units::bytes, allow_hyphen_values = true)]
    pub(crate) memory: Option<f64>,
    /// What a rank sends in a second, such as 12.5GB/s or 100Gbit/s [default: measured]
    #[arg(long, value_name = "BYTES/s", value_parser = units::bandwidth, allow_hyphen_values = true)]
    pub(crate) bandwidth: Option<f64>,
    /// Time of a step of communication, such as 50us [default: measured]
    #[arg(long, value_name = "TIME", value_parser = units::time, allow_hyphen_values = true)]
    pub(crate) latency: Option<f64>,
    /// A network, in place of its bandwidth and latency
    #[arg(long, value_enum, conflicts_with_all = ["bandwidth", "latency", "node_bandwidth", "node_latency"])]
    pub(crate) network: Option<NetworkName>,
    /// Ranks of a node [default: all, or those of --network]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub(crate) ranks_per_node: Option<usize>,
    /// What a rank sends in a second to another node [default: that of --bandwidth]
    #[arg(long, value_name = "BYTES/s", value_parser = units::bandwidth, allow_hyphen_values = true, requires = "ranks_per_node")]
    pub(crate) node_bandwidth: Option<f64>,
    /// Time of a step of communication with another node [default: that of --latency]
    #[arg(long, value_name = "TIME", value_parser = units::time, allow_hyphen_values = true, requires = "ranks_per_node")]
    pub(crate) node_latency: Option<f64>,
    /// Operations of a rank in a second, such as 80GFLOP/s [default: measured]
    #[arg(long, value_name = "FLOP/s", value_parser = units::flops, allow_hyphen_values = true)]
    pub(crate) flops: Option<f64>,
    /// What the optimizer of a rank reads and writes in a second, such as 20GB/s [default: measured with the others; where
    /// these are all given, it takes no time]
    #[arg(long, value_name = "BYTES/s", value_parser = units::bandwidth, allow_hyphen_values = true)]
    pub(crate) memory_bandwidth: Option<f64>,
    /// Samples a step, of all ranks together
    #[arg(long, value_name = "N", default_value = "16", value_parser = count, allow_negative_numbers = true)]
    pub(crate) batch_size: usize,
    /// Parts of a batch that go through a pipeline one after the other
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, allow_negative_numbers = true)]
    pub(crate) micro_batches: usize,
    /// What the optimizer remembers [default: as the command's; adam for fsdp-mlp, tensor-parallel-mlp and
    /// tensor-parallel-transformer, else sgd]
    #[arg(long, value_enum)]
    pub(crate) optimizer: Option<OptimizerName>,
    /// Bytes of a number: 4 for f32, 2 for f16 and bf16, 8 for f64
    #[arg(long, value_name = "N", default_value = "4", value_parser = count, allow_negative_numbers = true)]
    pub(crate) element_bytes: usize,
    /// The same for what fsdp gathers, computes with and averages: 2 for its default of f16 [default: that of --element-bytes]
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true)]
    pub(crate) gathered_bytes: Option<usize>,
    /// Write the plan as JSON, too
    #[arg(long, value_name = "FILE.json")]
    pub(crate) json: Option<PathBuf>,
    /// A language model's own.
    #[command(flatten)]
    pub(crate) language: LanguagePlanOptions,
    /// Sizes of linear layers in a row, separated by commas, in place of the command's
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) sizes: Vec<usize>,
    /// Tokens that there are
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) vocab_size: Option<usize>,
    /// Numbers that a token becomes
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) d_model: Option<usize>,
    /// Heads of attention
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) num_heads: Option<usize>,
    /// Width of the feed-forward layers
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) d_ff: Option<usize>,
    /// Layers
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) num_layers: Option<usize>,
    /// Longest row of tokens that the model can take
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) max_len: Option<usize>,
    /// Tokens in a row, one of which is only to be predicted
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) length: Option<usize>,
    /// Probability with which dropout zeroes a number; with any but 0 its results are kept [default: as the command's]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true, help_heading = "Model")]
    pub(crate) dropout: Option<f64>,
}

/// Larger sizes have no meaning. Products of several may yet be more than can be counted: see [`Extent`].
const LARGEST: usize = 1 << 24;
/// Each layer is a part of the model of its own.
const MOST_LAYERS: usize = 1 << 12;
/// Each goes through each stage in the table of who does what when.
const MOST_MICRO_BATCHES: usize = 1 << 12;

impl PlanOptions {
    /// The model's sizes.
    ///
    /// # Errors
    /// Sizes of another kind of model, too large ones, or such that do not go together.
    pub fn model(&self) -> Result<Model> {
        let name = self.model.to_possible_value().map_or(String::new(), |value| value.get_name().to_string());
        // Sizes, whether there is a function between layers, and the loss.
        let (mlp, has_function, loss): (&[u64], bool, MlpLoss) = match self.model {
            ModelName::DdpLinear => (&[1, 1], false, MlpLoss::Squares),
            ModelName::DdpTrainer => (&[20, 1], false, MlpLoss::Squares),
            ModelName::DdpMlp => (&[10, 20, 2], true, MlpLoss::Classes),
            ModelName::FsdpMlp => (&[1024, 4096, 4096, 1024, 10], false, MlpLoss::Classes),
            ModelName::TensorParallelMlp => (&[1024, 4096, 1024], true, MlpLoss::Squares),
            // vocabulary, features, heads, width, layers, longest row, row
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
            return Err(Error::Option { option: "--dropout", got: dropout.to_string(), help });
        }
        let given: Vec<u64> = self.sizes.iter().map(|size| *size as u64).collect();
        if let [only] = given[..] {
            return refuse("--sizes", only as usize, "a layer has two: give 2 or more".into());
        }
        check_sizes(self.sizes.iter().map(|size| ("--sizes", *size)))?;
        let sizes = if given.is_empty() { mlp } else { &given };
        let widest = sizes.iter().copied().max().unwrap_or(1);
        self.check_extent(Extent::of_layers(sizes), ("--sizes", widest as usize))?;
        let model = Model::mlp(&name, sizes, has_function, loss);
        Ok(match self.model {
            ModelName::DdpLinear | ModelName::DdpTrainer => model.with_separate_biases(),
            _ => model,
        })
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
        if !d_model.is_multiple_of(num_heads) {
            let help = format!("it is split over {num_heads} heads (--num-heads): give a multiple of that");
            return refuse("--d-model", d_model, help);
        }
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
        self.check_extent(Extent::of_transformer(&sizes), ("--d-model", d_model as usize))?;
        Ok(Model::transformer(name, &sizes))
    }

    /// Refuses what no machine has; an option with its value stands for all sizes.
    fn check_extent(&self, extent: Extent, (option, got): (&'static str, usize)) -> Result<()> {
        extent.check(self.batch_size).or_else(|error| match error {
            plan::Error::TooManySamples { .. } => refuse("--batch-size", self.batch_size, error.to_string()),
            error => refuse(option, got, error.to_string()),
        })
    }

    /// Bytes of a rank: what is given, or its part of this machine's.
    pub(super) fn memory(&self, ranks: usize) -> f64 {
        self.memory.unwrap_or_else(|| total_memory_bytes().unwrap_or(0) as f64 / ranks as f64)
    }

    /// What is given, or what the command has.
    pub(super) fn optimizer(&self) -> Optimizer {
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

    /// Refuses numbers that no machine has.
    pub(super) fn check(&self) -> Result<()> {
        let most = |option, got: usize, most: usize| match got > most {
            true => refuse(option, got, format!("give at most {most}")),
            false => Ok(()),
        };
        most("--ranks", self.ranks, 1 << 20)?;
        most("--batch-size", self.batch_size, LARGEST)?;
        most("--micro-batches", self.micro_batches, MOST_MICRO_BATCHES)?;
        let bytes = |option, got: usize| match got {
            2 | 4 | 8 => Ok(()),
            got => refuse(option, got, "give 2, 4 or 8".into()),
        };
        bytes("--element-bytes", self.element_bytes)?;
        self.gathered_bytes.map_or(Ok(()), |got| bytes("--gathered-bytes", got))
    }
}

fn refuse<T>(option: &'static str, got: usize, help: String) -> Result<T> {
    Err(Error::Option { option, got: got.to_string(), help })
}

fn check_sizes(mut sizes: impl Iterator<Item = (&'static str, usize)>) -> Result<()> {
    match sizes.find(|(_, size)| *size > LARGEST) {
        Some((option, size)) => refuse(option, size, format!("give at most {LARGEST}")),
        None => Ok(()),
    }
}
