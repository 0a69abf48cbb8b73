//! `plan --model`: the plan of a language model in each layout, as `pretrain` and `finetune` train it.

use std::path::Path;

use crate::console::say;
use crate::error::{Result, refuse};
use crate::options::{check_once, check_rank};
use crate::outputs;
use models::{LabelsConfig, Lora, LoraConfig, ModelConfig, Problem};
use plan::command::PlanOptions;
use plan::language::{LanguageTable, Subject, layouts};
use training::FileError;
use training::build::Recompute;

/// Maximum number of ranks, since all their layouts are examined.
const MOST_RANKS: usize = 1 << 16;

/// Prints the plan of each layout.
pub(super) fn run(options: &PlanOptions, folder: &Path) -> Result<()> {
    let own = &options.language;
    let mut config = config(folder)?;
    if let Some(count) = own.labels {
        let names = (0..count).map(|id| id.to_string()).collect();
        config = config.with_labels(LabelsConfig { names, problem: Problem::MultiLabel, pad_token: None })?;
    }
    let lora = match own.lora_rank {
        Some(rank) => {
            check_rank(rank)?;
            let (dora, save_modules) = (own.lora_dora, own.lora_save_modules.clone());
            check_once("--lora-rank-pattern", &own.lora_rank_pattern)?;
            let (targets, rank_pattern) =
                (own.lora_targets.clone(), own.lora_rank_pattern.iter().cloned().collect());
            let lora =
                LoraConfig { rank, targets, rank_pattern, dora, save_modules, ..LoraConfig::default() };
            let lora = Lora::new(&lora, &config)?;
            Some(match (config.base_format(), own.base_bits) {
                (_, Some(format)) => lora.quantized(format)?,
                // A folder's own few bits are kept.
                (Some(format), None) => lora.planned_in(format)?,
                (None, None) => lora,
            })
        }
        None => None,
    };
    let length = options.length.unwrap_or(LENGTH.min(config.max_len));
    if length > config.max_len {
        let help = format!("the model has {} positions: give at most that many", config.max_len);
        return refuse("--length", length, help);
    }
    let ranks = own.mesh.map_or(options.ranks, |layout| layout.ranks());
    if ranks > MOST_RANKS {
        let help = format!("give at most {MOST_RANKS}");
        return refuse("--ranks", ranks, help);
    }
    let training = own.training(options.batch_size(), length, options.optimizer);
    recompute_fits(training.recompute, config.num_layers)?;
    let reference =
        own.reference.as_deref().map(|other| reference(other, folder, lora.as_ref())).transpose()?;
    let subject = Subject::new(config, lora);
    let subject = match reference {
        Some(reference) => subject.with_reference(reference),
        None => subject,
    };
    let all = own.mesh.map_or_else(|| layouts(ranks, length, subject.experts()), |layout| vec![layout]);
    let compared = subject.compare(&training, &all)?;
    let ranks = super::ranks(options, ranks)?;
    let table = LanguageTable { subject: &subject, training: &training, ranks: &ranks };
    if let Some(path) = &options.json {
        outputs::write(path, table.json(&compared)?)?;
    }
    table.lines(&compared)?.iter().try_for_each(|line| say(format_args!("{line}")))
}

/// Returns the reference of `prefer`: the model itself is one without adapters, on the same base.
fn reference(other: &Path, folder: &Path, lora: Option<&Lora>) -> Result<Subject> {
    let is_itself = other.canonicalize().ok() == folder.canonicalize().ok();
    Ok(Subject::new(config(other)?, lora.filter(|lora| is_itself && lora.base_format().is_some()).cloned()))
}

/// Checks that `--recompute N` recomputes any of a model's blocks.
///
/// # Errors
/// More than there are blocks.
pub(crate) fn recompute_fits(recompute: Recompute, blocks: usize) -> Result<()> {
    match recompute {
        Recompute::Every(each) if each > blocks => {
            refuse("--recompute", each, format!("the model has {blocks} blocks: give at most that many"))
        }
        _ => Ok(()),
    }
}

/// Default tokens per row, as in `pretrain` and `finetune`.
const LENGTH: usize = 1024;

fn config(path: &Path) -> Result<ModelConfig> {
    match path.is_file() && !models::is_gguf(path) {
        // A configuration alone, without the folder of its model.
        true => {
            let text = std::fs::read_to_string(path).map_err(|error| FileError::read(path, error))?;
            Ok(ModelConfig::from_json(&text)?)
        }
        false => Ok(ModelConfig::from_folder(path)?),
    }
}
