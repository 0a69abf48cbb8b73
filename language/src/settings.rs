//! Settings that affect what a run learns: stored in its checkpoints, and compared when it is resumed.

use std::collections::BTreeMap;

use clap::ValueEnum;
use experiment::console::note;
use girandole::trainer::{ChangedSetting, TrainConfig};
use models::Lora;

use super::options::TrainOptions;

/// Returns the training configuration, with the settings by option name.
pub(super) fn train_config(command: &str, options: &TrainOptions, lora: Option<&Lora>) -> TrainConfig {
    let config = options.train_config();
    let mut settings: BTreeMap<String, String> =
        of(options, &config).into_iter().map(|(name, value)| (format!("--{name}"), value)).collect();
    settings.insert("command".into(), command.into());
    if let Some(lora) = lora {
        settings.insert("--lora-alpha".into(), lora.config().alpha.to_string());
        settings.insert("--lora-dropout".into(), lora.config().dropout.to_string());
    }
    TrainConfig { settings, ..config }
}

/// Excludes options that do not affect results (the layout), and the rows, which are compared separately and must be
/// the same.
fn of(options: &TrainOptions, config: &TrainConfig) -> [(&'static str, String); 13] {
    let adam = &config.adam;
    [
        ("steps", config.steps.to_string()),
        ("batch-size", config.batch_size.to_string()),
        ("lr", config.learning_rate.to_string()),
        ("schedule", name_of(&options.schedule)),
        ("warmup", config.schedule.warmup.to_string()),
        ("lowest-lr", config.schedule.lowest.to_string()),
        ("betas", format!("{},{}", adam.beta1, adam.beta2)),
        ("eps", adam.eps.to_string()),
        ("weight-decay", adam.weight_decay.to_string()),
        ("dropout", options.dropout.map_or_else(|| "of config.json".into(), |p| p.to_string())),
        ("clip", config.clip.unwrap_or(0.0).to_string()),
        ("parameters", name_of(&options.parameters)),
        ("precision", name_of(&options.precision)),
    ]
}

fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().into())
}

/// Prints the settings that differ from the checkpoint's, in one line.
pub(super) fn note_changed_settings(changes: &[ChangedSetting]) {
    if changes.is_empty() {
        return;
    }
    let each =
        changes.iter().map(|ChangedSetting { name, before, now }| format!("{name} {before}, now {now}"));
    let each = each.collect::<Vec<_>>().join("; ");
    note(format_args!("other options than those of the checkpoint: {each}"));
}
