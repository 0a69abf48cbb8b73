//! The options of `scaling-report`.

use std::path::{Path, PathBuf};
use std::thread::available_parallelism;

use clap::{Parser, ValueEnum};
use cli::error::{Error, Result};
use plan::forecast::Network;
use serde::{Deserialize, Serialize, Serializer};

use super::Kind;
use crate::workload::Sizes;

/// Maximum number of ranks on one machine: each has a thread, and they share its cores.
const MOST_RANKS: usize = 64;

/// Measures how training scales over ranks on this machine, and writes scaling.html and scaling.json
#[derive(Debug, Clone, PartialEq, Parser, Serialize, Deserialize)]
#[command(name = "scaling-report", max_term_width = 110)]
pub struct Options {
    /// Folder to write to; it is made if there is none
    #[arg(long, value_name = "DIR")]
    #[serde(serialize_with = "as_shown")]
    pub out: PathBuf,
    /// Numbers of ranks, separated by commas [default: 1, 2, 4 and so on, up to the cores; 1,2 at least]
    #[arg(long, value_name = "RANKS", value_delimiter = ',')]
    pub ranks: Vec<usize>,
    /// Threads of each rank, the same whatever their number
    #[arg(long, value_name = "N", default_value = "1")]
    pub threads: usize,
    /// Strategies, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ddp,fsdp,tensor-parallel,pipeline")]
    pub strategies: Vec<Kind>,
    /// Rows of tokens for each rank in weak scaling; strong scaling has as many in all as the most ranks have together
    #[arg(long, value_name = "N", default_value = "8")]
    pub batch_size: usize,
    /// Features of a token
    #[arg(long, value_name = "N", default_value_t = Sizes::LARGE.d_model)]
    pub d_model: usize,
    /// Heads of attention
    #[arg(long, value_name = "N", default_value_t = Sizes::LARGE.num_heads)]
    pub num_heads: usize,
    /// Blocks
    #[arg(long, value_name = "N", default_value_t = Sizes::LARGE.num_layers)]
    pub num_layers: usize,
    /// Tokens in a row
    #[arg(long, value_name = "N", default_value_t = Sizes::LARGE.length)]
    pub length: usize,
    /// Tokens in the vocabulary
    #[arg(long, value_name = "N", default_value_t = Sizes::LARGE.vocab_size)]
    pub vocab_size: usize,
    /// About how long each run is measured
    #[arg(long, value_name = "SECONDS", default_value = "3", allow_negative_numbers = true)]
    pub seconds: f64,
    /// Rounds in which all runs take turns; each figure is that of the median round
    #[arg(long, value_name = "N", default_value = "3")]
    pub rounds: usize,
    /// Networks for which many ranks are predicted, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_value = "nvlink,infiniband,ethernet-25g")]
    pub networks: Vec<Preset>,
    /// Most ranks that are predicted
    #[arg(long, value_name = "N", default_value = "1024")]
    pub most_ranks: usize,
    /// Operations a second of each of them
    #[arg(long, value_name = "FLOP/s", default_value = "400e12", allow_negative_numbers = true)]
    pub flops: f64,
}

/// A network that is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Preset {
    /// Nodes of 8, NVLink within and InfiniBand between them
    Nvlink,
    /// InfiniBand of 400 Gbit/s between all ranks
    Infiniband,
    /// Ethernet of 25 Gbit/s between all ranks
    #[value(name = "ethernet-25g")]
    Ethernet25g,
}

impl Preset {
    pub(super) fn network(self) -> Network {
        match self {
            Self::Nvlink => Network::nvlink(),
            Self::Infiniband => Network::infiniband(),
            Self::Ethernet25g => Network::ethernet_25g(),
        }
    }
}

/// Serializes a path lossily, so that one that is not UTF-8 does not prevent writing the results.
fn as_shown<S: Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

impl Options {
    /// Returns the numbers of ranks, in ascending order.
    pub fn ranks(&self) -> Vec<usize> {
        let mut ranks = self.ranks.clone();
        if ranks.is_empty() {
            let cores = available_parallelism().map_or(1, usize::from).max(2);
            ranks = std::iter::successors(Some(1), |ranks| Some(ranks * 2))
                .take_while(|ranks| *ranks <= cores)
                .collect();
        }
        ranks.push(1);
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns the sizes of the model.
    pub fn sizes(&self) -> Sizes {
        let &Self { vocab_size, d_model, num_heads, num_layers, length, .. } = self;
        Sizes { vocab_size, d_model, num_heads, d_ff: 4 * d_model, num_layers, length }
    }

    pub(super) fn check(&self) -> Result<()> {
        let counts = [
            ("--threads", self.threads, 1024),
            ("--batch-size", self.batch_size, 1 << 16),
            ("--d-model", self.d_model, 1 << 16),
            ("--num-heads", self.num_heads, self.d_model),
            ("--num-layers", self.num_layers, 1 << 12),
            ("--length", self.length, 1 << 16),
            ("--vocab-size", self.vocab_size, 1 << 24),
            ("--rounds", self.rounds, 1000),
            ("--most-ranks", self.most_ranks, 4096),
        ];
        for (option, got, most) in counts {
            if got == 0 || got > most {
                return refuse(option, got, format!("give 1 to {most}"));
            }
        }
        let ranks = self.ranks();
        let most = ranks.last().copied().unwrap_or(1);
        if ranks[0] == 0 || most > MOST_RANKS {
            return refuse(
                "--ranks",
                if ranks[0] == 0 { 0 } else { most },
                format!("give 1 to {MOST_RANKS}"),
            );
        }
        if !(self.seconds > 0.0 && self.seconds <= 3600.0) {
            return refuse("--seconds", self.seconds, "give more than 0, up to 3600".into());
        }
        if !(self.flops.is_finite() && self.flops >= 1e6) {
            return refuse("--flops", self.flops, "give 1e6 or more, such as 400e12".into());
        }
        if !self.d_model.is_multiple_of(2 * self.num_heads) {
            let help =
                format!("it is split over {} heads of an even size: give a multiple of that", self.num_heads);
            return refuse("--d-model", self.d_model, help);
        }
        self.check_strategies(&ranks, most)
    }

    fn check_strategies(&self, ranks: &[usize], most: usize) -> Result<()> {
        let together = self.batch_size * most;
        if let Some(odd) = ranks.iter().find(|ranks| !together.is_multiple_of(**ranks)) {
            let help =
                format!("strong scaling splits {together} rows over {odd} ranks: give a multiple of {odd}");
            return refuse("--batch-size", self.batch_size, help);
        }
        if self.strategies.contains(&Kind::TensorParallel) {
            for (option, size) in [("--num-heads", self.num_heads), ("--vocab-size", self.vocab_size)] {
                if let Some(odd) = ranks.iter().find(|ranks| !size.is_multiple_of(**ranks)) {
                    return refuse(
                        option,
                        size,
                        format!("tensor parallelism divides it by {odd} ranks: give a multiple"),
                    );
                }
            }
        }
        // The embedding, the positional encoding and the last layer are modules, too.
        let modules = self.num_layers + 3;
        if self.strategies.contains(&Kind::Pipeline) && most > modules {
            return refuse(
                "--ranks",
                most,
                format!("the model has {modules} modules for stages: give more --num-layers"),
            );
        }
        Ok(())
    }
}

fn refuse(option: &'static str, got: impl ToString, help: String) -> Result<()> {
    Err(Error::Option { option, got: got.to_string(), help })
}
