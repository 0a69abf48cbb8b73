//! `plan --model`: a language model in any layout, as `pretrain` and `finetune` train it.

use std::path::{Path, PathBuf};

use clap::Args;
use girandole::Layout;
use models::{Lora, LoraConfig, ModelConfig};
use pipeline::ScheduleKind;
use plan::Optimizer;
use plan::language::{LanguageTable, Subject, Training, layouts};
use training::build::Recompute;

use crate::console::say;
use crate::error::{Error, Result};
use crate::file_error::FileError;
use crate::language::{ParametersDtype, recompute, schedule};
use crate::options::count;
use crate::outputs;

use super::hardware;
use super::options::PlanOptions;

/// Ranks of which all layouts are looked at.
const MOST_RANKS: usize = 1 << 16;

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
    mesh: Option<Layout>,
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
    #[arg(long, default_value = "1f1b", value_name = "NAME", value_parser = schedule, help_heading = "Language models")]
    pipeline_schedule: ScheduleKind,
    /// Type of parameters
    #[arg(long, value_name = "TYPE", value_enum, default_value = "f32", help_heading = "Language models")]
    parameters: ParametersDtype,
    /// Rank of adapters (LoRA) [default: no adapters]
    ///
    /// Only the adapters are trained; all linear layers have some.
    #[arg(long, value_name = "N", value_parser = count, allow_negative_numbers = true, requires = "folder", help_heading = "Language models")]
    lora_rank: Option<usize>,
}

/// Prints what each layout needs.
pub(super) fn run(options: &PlanOptions, folder: &Path) -> Result<()> {
    let own = &options.language;
    let config = config(folder)?;
    let lora = match own.lora_rank {
        Some(rank) => Some(Lora::new(&LoraConfig { rank, ..LoraConfig::default() }, &config)?),
        None => None,
    };
    let length = options.length.unwrap_or(LENGTH.min(config.max_len));
    if length > config.max_len {
        let help = format!("the model has {} positions: give at most that many", config.max_len);
        return Err(Error::Option { option: "--length", got: length.to_string(), help });
    }
    let ranks = own.mesh.map_or(options.ranks, |layout| layout.ranks());
    if ranks > MOST_RANKS {
        let help = format!("give at most {MOST_RANKS}");
        return Err(Error::Option { option: "--ranks", got: ranks.to_string(), help });
    }
    let subject = Subject::new(config, lora);
    let training = own.training(options.batch_size(), length, options.optimizer.map(Optimizer::from));
    let all = own.mesh.map_or_else(|| layouts(ranks), |layout| vec![layout]);
    let compared = subject.compare(&training, &all)?;
    let (hardware, measured) = hardware(options, ranks)?;
    let memory = options.memory(ranks);
    let table = LanguageTable {
        subject: &subject,
        training: &training,
        ranks,
        memory,
        hardware: &hardware,
        measured,
    };
    if let Some(path) = &options.json {
        outputs::write(path, table.json(&compared)?)?;
    }
    table.lines(&compared)?.iter().try_for_each(|line| say(format_args!("{line}")))
}

/// Tokens of a row, as of `pretrain` and `finetune`.
const LENGTH: usize = 1024;

fn config(path: &Path) -> Result<ModelConfig> {
    if !path.is_file() {
        return Ok(ModelConfig::from_folder(path)?);
    }
    let text = std::fs::read_to_string(path).map_err(|error| FileError::read(path, error))?;
    Ok(ModelConfig::from_json(&text)?)
}

impl LanguagePlanOptions {
    fn training(&self, batch_size: usize, length: usize, optimizer: Option<Optimizer>) -> Training {
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
