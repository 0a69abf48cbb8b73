//! The options of `plan --model`.

use std::path::PathBuf;
use std::str::FromStr;

use candle_core::DType;
use clap::{Args, ValueEnum};
use girandole::Layout;
use launch::command::count;
use ops::quantized::Format;
use pipeline::ScheduleKind;
use training::build::Recompute;

use crate::Optimizer;
use crate::language::Training;

/// What parameters are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ParametersDtype {
    /// 4 bytes per parameter.
    F32,
    /// 2 bytes per parameter, and 2 more in the optimizer's state, which is f32.
    Bf16,
    /// More digits and a smaller range than bf16: the loss is scaled.
    F16,
}

impl ParametersDtype {
    /// Returns the type of a parameter.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
            Self::F16 => DType::F16,
        }
    }
}

/// Parses the name of a pipeline schedule.
///
/// # Errors
/// What is accepted.
pub fn schedule(text: &str) -> std::result::Result<ScheduleKind, String> {
    text.parse().map_err(|error: pipeline::Error| error.to_string())
}

/// Parses what is computed again in backward: `selective`, or every how many units.
///
/// # Errors
/// What is accepted.
pub fn recompute(text: &str) -> std::result::Result<Recompute, String> {
    match text {
        "selective" => Ok(Recompute::Selective),
        "1" => Ok(Recompute::Units),
        _ => count(text).map(Recompute::Every).map_err(|_| "give a number, 1 or more, or selective".into()),
    }
}

/// Options of `plan --model`, those of `pretrain`, `finetune` and `prefer`.
#[derive(Debug, Clone, Args)]
pub struct LanguagePlanOptions {
    /// Folder, config.json or GGUF file of a model
    ///
    /// In place of MODEL: a Llama, Mistral, Mixtral, Qwen2.5, Qwen3, their models with experts, DeepSeek V3 or GPT-2.
    #[arg(
        id = "folder",
        long = "model",
        value_name = "DIR",
        conflicts_with_all = ["model", "micro_batches", "element_bytes", "gathered_bytes", "sizes", "vocab_size", "d_model", "num_heads",
            "d_ff", "num_layers", "max_len", "dropout"],
        help_heading = "Language models"
    )]
    pub folder: Option<PathBuf>,
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
    pub mesh: Option<Layout>,
    /// Parts of a rank's rows [default: 1, or pp]
    ///
    /// They are computed in turn.
    #[arg(long, value_name = "N", value_parser = count, requires = "folder", help_heading = "Language models")]
    accumulate: Option<usize>,
    /// Recompute every N-th block in backward
    ///
    /// Only the input of such a block is kept; 1 recomputes all blocks. `selective` recomputes in all blocks only what is cheap,
    /// and keeps matrix products.
    #[arg(long, value_name = "N|selective", value_parser = recompute, requires = "folder", help_heading = "Language models", allow_negative_numbers = true)]
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
    /// Tokens of a document in packed rows [default: a row's]
    ///
    /// Of documents that do not see each other (`pretrain --packing documents` or `whole`), the mean over tokens: attention takes
    /// less time.
    #[arg(long, value_name = "N", value_parser = count, requires = "folder", help_heading = "Language models")]
    document_length: Option<usize>,
    /// Rank of adapters (LoRA) [default: no adapters]
    ///
    /// Only the adapters are trained.
    #[arg(long, value_name = "N", value_parser = count, requires = "folder", help_heading = "Language models")]
    pub lora_rank: Option<usize>,
    /// Layers with adapters
    ///
    /// As those of `finetune`: the ends of their names; of experts experts.gate_up_proj and experts.down_proj.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "all-linear",
        requires = "lora_rank",
        help_heading = "Language models"
    )]
    pub lora_targets: Vec<String>,
    /// Other ranks, such as q_proj=8,down_proj=32
    ///
    /// As those of `finetune`.
    #[arg(
        long,
        value_name = "NAME=N",
        value_delimiter = ',',
        value_parser = pattern::<usize>,
        requires = "lora_rank",
        help_heading = "Language models"
    )]
    pub lora_rank_pattern: Vec<(String, usize)>,
    /// Train a magnitude for each output, too (DoRA)
    #[arg(long, requires = "lora_rank", help_heading = "Language models")]
    pub lora_dora: bool,
    /// Modules to train whole: embed_tokens, lm_head
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        requires = "lora_rank",
        help_heading = "Language models"
    )]
    pub lora_save_modules: Vec<String>,
    /// Labels of a new head [default: folder's head]
    ///
    /// So many labels that the head scores documents for, as with `finetune --task`.
    #[arg(long, value_name = "N", value_parser = count, requires = "folder", help_heading = "Language models")]
    pub labels: Option<usize>,
    /// Folder of the reference of `prefer`
    ///
    /// That of --model, or another: its forward pass over all rows comes before training, and may need more memory.
    #[arg(long, value_name = "DIR", requires = "folder", help_heading = "Language models")]
    pub reference: Option<PathBuf>,
    /// Bits of the base's weights: 4 or 8 [default: all]
    #[arg(long, value_name = "BITS", value_parser = base_format, requires = "lora_rank", help_heading = "Language models")]
    pub base_bits: Option<Format>,
}

impl LanguagePlanOptions {
    /// Returns the training configuration to plan for.
    pub fn training(&self, batch_size: usize, length: usize, optimizer: Option<Optimizer>) -> Training {
        Training {
            batch_size,
            length,
            document_length: self.document_length.map(|length| length as f64),
            micro_batches: self.accumulate,
            recompute: self.recompute.unwrap_or_default(),
            schedule: self.pipeline_schedule,
            dtype: self.parameters.dtype(),
            optimizer: optimizer.unwrap_or(Optimizer::Adam),
        }
    }
}

/// Reads the bits of a base's weights.
///
/// # Errors
/// Other bits than there are formats for.
pub fn base_format(text: &str) -> Result<Format, &'static str> {
    match text {
        "4" => Ok(Format::Nf4),
        "8" => Ok(Format::Int8),
        _ => Err("give 4 or 8, or leave it out"),
    }
}

/// Reads a layer and its number, such as `q_proj=8`.
///
/// # Errors
/// Other texts.
pub fn pattern<T: FromStr>(text: &str) -> Result<(String, T), &'static str> {
    let parts = text.rsplit_once('=').filter(|(name, _)| !name.is_empty());
    let parsed = parts.and_then(|(name, number)| Some((name.to_string(), number.parse().ok()?)));
    parsed.ok_or("give a layer and its number, such as q_proj=8")
}
