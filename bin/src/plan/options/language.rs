//! The options of `plan --model`.

use std::path::PathBuf;

use clap::Args;
use experiment::options::count;
use girandole::Layout;
use language::{ParametersDtype, recompute, schedule};
use pipeline::ScheduleKind;
use plan::Optimizer;
use plan::language::Training;
use training::build::Recompute;

/// Options of `plan --model`, those of `pretrain` and `finetune`.
#[derive(Debug, Clone, Args)]
pub(crate) struct LanguagePlanOptions {
    /// Folder with config.json, or that file
    ///
    /// In place of MODEL: a Llama, Mistral, Qwen2.5, Qwen3 or GPT-2.
    #[arg(
        id = "folder",
        long = "model",
        value_name = "DIR",
        conflicts_with_all = ["model", "micro_batches", "element_bytes", "gathered_bytes", "sizes", "vocab_size", "d_model", "num_heads",
            "d_ff", "num_layers", "max_len", "dropout"],
        help_heading = "Language models"
    )]
    pub(crate) folder: Option<PathBuf>,
    /// One layout, such as pp=2,tp=2 [default: all]
    ///
    /// By default all layouts of --ranks ranks.
    #[arg(
        long,
        value_name = "AXES",
        conflicts_with = "ranks",
        requires = "folder",
        help_heading = "Language models"
    )]
    pub(crate) mesh: Option<Layout>,
    /// Parts of a rank's rows [default: 1, or pp]
    ///
    /// They are computed in turn.
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, requires = "folder", help_heading = "Language models")]
    accumulate: Option<usize>,
    /// Recompute every N-th block in backward
    ///
    /// Only the input of such a block is kept; 1 recomputes all blocks. `selective` recomputes in all blocks only what is cheap,
    /// and keeps matrix products.
    #[arg(long, value_name = "N|selective", value_parser = recompute, allow_negative_numbers = true, requires = "folder", help_heading = "Language models")]
    recompute: Option<Recompute>,
    /// Schedule of pipeline stages
    #[arg(long, default_value = "1f1b", value_name = "NAME", value_parser = schedule, requires = "folder", help_heading = "Language models")]
    pipeline_schedule: ScheduleKind,
    /// Type of parameters
    #[arg(
        long,
        value_name = "TYPE",
        value_enum,
        default_value = "f32",
        requires = "folder",
        help_heading = "Language models"
    )]
    parameters: ParametersDtype,
    /// Rank of adapters (LoRA) [default: no adapters]
    ///
    /// Only the adapters are trained; all linear layers have some.
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, requires = "folder", help_heading = "Language models")]
    pub(crate) lora_rank: Option<usize>,
}

impl LanguagePlanOptions {
    /// Returns the training configuration to plan for.
    pub(crate) fn training(
        &self,
        batch_size: usize,
        length: usize,
        optimizer: Option<Optimizer>,
    ) -> Training {
        Training {
            batch_size,
            length,
            micro_batches: self.accumulate,
            recompute: self.recompute.unwrap_or_default(),
            schedule: self.pipeline_schedule,
            dtype: self.parameters.dtype(),
            optimizer: optimizer.unwrap_or(Optimizer::Adam),
        }
    }
}
