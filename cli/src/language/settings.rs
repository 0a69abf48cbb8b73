//! Settings that affect what a run learns: stored in its checkpoints, and compared when it is resumed.

use std::collections::BTreeMap;
use std::path::Path;

use crate::console::note;
use crate::error::{Error, Result};
use crate::options::value_name;
use girandole::FarConfig;
use girandole::settings::Setting;
use girandole::trainer::{ChangedSetting, OptimizerConfig, TrainConfig};
use girandole::training::AdamConfig;
use models::tokens::{Rows, TokenFile};

use super::job::{Job, Subject};
use super::options::{TrainOptions, adjust_name, balance_name};

/// What the settings call the model's configuration, and its weights below adapters.
const MODEL: &str = "the model";
const FROZEN: &str = "the frozen weights";
/// What pairs are compared with, whose log-probabilities checkpoints hold.
const REFERENCE: &str = "--reference";
/// The scale of adapters, by which their weights are multiplied.
const SCALE: [&str; 3] = ["--lora-alpha", "--lora-alpha-pattern", "--lora-rslora"];
/// Weights that are trained, which checkpoints hold themselves: only ranks compare them.
const BASE: &str = "the weights of --model";

/// Returns the training configuration, with the settings by option name, and fingerprints of the model and, where it is
/// given, of the weights in its folder and in that of another reference.
pub(super) fn train_config<J: Job>(
    job: &J,
    subject: &Subject,
    weights: Option<String>,
    reference: Option<String>,
) -> TrainConfig {
    let config = config_of(J::NAME, job.options(), subject, weights);
    let reference = reference.map(|hash| (REFERENCE.into(), short(hash)));
    let settings = config.settings.into_iter().chain(job.settings()).chain(reference).collect();
    TrainConfig { settings, ..config }
}

fn config_of(
    command: &str,
    options: &TrainOptions,
    subject: &Subject,
    weights: Option<String>,
) -> TrainConfig {
    let mut config = options.train_config();
    config.gradient_check.frozen =
        subject.lora.as_ref().map_or_else(Vec::new, models::Lora::stopped_gradients);
    let mut settings: BTreeMap<String, String> =
        of(options, &config).into_iter().map(|(name, value)| (format!("--{name}"), value)).collect();
    settings.insert("command".into(), command.into());
    let model = subject.weights.config();
    settings.insert(MODEL.into(), format!("{} {}", model.family, short(model.fingerprint())));
    let name = if subject.lora.is_some() { FROZEN } else { BASE };
    let format = subject.lora.as_ref().and_then(models::Lora::base_format);
    let bits = format.map(|format| format.bits().to_string());
    let held = bits.as_ref().map_or_else(String::new, |bits| format!(" in {bits} bits"));
    settings.extend(weights.map(|hash| (name.into(), short(hash) + &held)));
    settings.extend(bits.map(|bits| ("--base-bits".into(), bits)));
    if let Some(lora) = &subject.lora {
        let config = lora.config();
        let patterns = config.alpha_pattern.iter().map(|(pattern, alpha)| format!("{pattern}={alpha}"));
        let patterns = patterns.collect::<Vec<_>>().join(",");
        let scale = [config.alpha.to_string(), patterns, config.by_root.to_string()];
        settings.extend(SCALE.map(String::from).into_iter().zip(scale));
        settings.insert("--lora-dropout".into(), config.dropout.to_string());
    }
    if let Some(experts) = &model.experts {
        let balance = options.balance_of(experts, model.labels.is_some());
        settings.insert("--balance".into(), balance_name(&balance));
        if balance.loss.is_some() || balance.bias.is_some() {
            settings.insert("--balance-coefficient".into(), balance.coefficient.to_string());
        }
    }
    TrainConfig { settings, ..config }
}

fn short(hash: String) -> String {
    hash.chars().take(12).collect()
}

/// Excludes options that do not affect results (the layout), and the rows, which are compared separately and must be
/// the same.
fn of(options: &TrainOptions, config: &TrainConfig) -> Vec<(&'static str, String)> {
    let others = [
        ("steps", config.steps.to_string()),
        ("batch-size", config.batch_size.to_string()),
        ("lr", config.learning_rate.to_string()),
        ("schedule", value_name(&options.schedule)),
        ("warmup", config.schedule.warmup.to_string()),
        ("lowest-lr", config.schedule.lowest.to_string()),
        ("dropout", options.dropout.map_or_else(|| "of config.json".into(), |p| p.to_string())),
        ("clip", config.clip.unwrap_or(0.0).to_string()),
        ("parameters", value_name(&options.parameters)),
        ("precision", value_name(&options.precision)),
    ];
    let far = options.mesh.filter(|layout| layout.far > 1).map(|_| of_far(&config.far));
    let far = far.into_iter().flatten();
    others.into_iter().chain(of_optimizer(&config.optimizer)).chain(far).collect()
}

fn of_far(far: &FarConfig) -> [(&'static str, String); 6] {
    [
        ("far-every", far.every.to_string()),
        ("far-lr", far.learning_rate.to_string()),
        ("far-momentum", far.momentum.to_string()),
        ("far-fragments", far.fragments.to_string()),
        ("far-delay", far.delay.to_string()),
        ("far-bits", format!("{:?}", far.precision)),
    ]
}

fn of_optimizer(optimizer: &OptimizerConfig) -> Vec<(&'static str, String)> {
    let of_adam = |adam: &AdamConfig| {
        [("betas", format!("{},{}", adam.beta1, adam.beta2)), ("eps", adam.eps.to_string())]
    };
    let decay = |decay: f64| ("weight-decay", decay.to_string());
    let own = match optimizer {
        OptimizerConfig::AdamW(adam) => [&of_adam(adam)[..], &[decay(adam.weight_decay)]].concat(),
        OptimizerConfig::Muon { config: muon, .. } => {
            let own = [
                ("momentum", muon.momentum.to_string()),
                ("nesterov", muon.nesterov.to_string()),
                ("adjust-lr", adjust_name(muon.adjust)),
                ("adamw-lr", muon.adam.learning_rate.to_string()),
                decay(muon.weight_decay),
            ];
            [&own[..], &of_adam(&muon.adam)].concat()
        }
        OptimizerConfig::Sgd(sgd) => vec![
            ("momentum", sgd.momentum.to_string()),
            ("nesterov", sgd.nesterov.to_string()),
            decay(sgd.weight_decay),
        ],
    };
    [vec![("optimizer", optimizer.name().into())], own].concat()
}

/// Returns what was read, which must be the same on all ranks wherever each has its files: the tokens of each file, and the
/// model.
pub(super) fn contents(subject: &Subject, rows: &Rows, evaluation: Option<&Rows>) -> Vec<Setting> {
    let of_files = |option: &str, rows: &Rows| {
        let one = |(file, taken): (&TokenFile, u64)| {
            let (tokens, length) = (file.tokens(), rows.row_len());
            let content = format!(
                "{tokens} tokens with SHA-256 {}, {taken} rows of {length} taken",
                file.fingerprint()
            );
            Setting::new(option, &content).shown_as(format_args!("{} of {content}", file.path().display()))
        };
        rows.files().map(one).collect::<Vec<_>>()
    };
    let evaluation = match evaluation {
        Some(rows) => of_files("--evaluate", rows),
        None => vec![Setting::absent("--evaluate")],
    };
    let model = subject.weights.config();
    let spread = model.json().get("initializer_range").map(|spread| format!(", random weights of {spread}"));
    let config = format!("{} {}{}", model.family, model.fingerprint(), spread.unwrap_or_default());
    // Its weights are compared with the trainer's settings.
    [of_files("--data", rows), evaluation, vec![Setting::new("--model with the configuration", config)]]
        .concat()
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

/// Refuses a checkpoint whose run had another model, another reference, or another scale of adapters: the checkpoint's numbers mean
/// something else in this one.
///
/// # Errors
/// The option that names the checkpoint, and what differs.
pub(super) fn refuse_another_model(changed: &[ChangedSetting], option: &str, got: &Path) -> Result<()> {
    let is_meaning = |name: &str| [MODEL, FROZEN, REFERENCE].contains(&name) || SCALE.contains(&name);
    let Some(other) = changed.iter().find(|setting| is_meaning(&setting.name)) else { return Ok(()) };
    let ChangedSetting { name, before, now } = other;
    let help =
        format!("{name}: not as in that run ({before} then, {now} now): give the same, or another folder");
    Err(Error::Contradiction { option: option.into(), got: got.display().to_string(), help })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use models::{Lora, LoraConfig, ModelConfig, Weights};

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        options: TrainOptions,
    }

    #[test]
    fn another_model_is_another_setting() {
        let options = Program::parse_from(["pretrain", "--data", "text.txt", "--out", "out"]).options;
        let settings = |theta: usize, by_root: bool| {
            let json = format!(
                r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
                "num_attention_heads": 1, "max_position_embeddings": 8, "rms_norm_eps": 1e-6, "rope_theta": {theta}}}"#
            );
            let model = ModelConfig::from_json(&json).unwrap();
            let lora = Lora::new(&LoraConfig { by_root, ..LoraConfig::default() }, &model).unwrap();
            let weights = Weights::random(&model, 0).unwrap();
            let subject = Subject { weights, lora: Some(lora), tokenizer: None };
            config_of("finetune", &options, &subject, Some("0123".repeat(9))).settings
        };
        assert_eq!(settings(100, false), settings(100, false));
        assert_ne!(settings(100, false)[MODEL], settings(200, false)[MODEL]);
        assert_eq!(settings(100, false)[FROZEN], "012301230123");
        let setting = |name: &str| ChangedSetting { name: name.into(), before: "a".into(), now: "b".into() };
        let refused = |names: &[&str]| {
            let changed: Vec<_> = names.iter().map(|name| setting(name)).collect();
            refuse_another_model(&changed, "--checkpoint-dir", Path::new("c"))
                .map_err(|error| error.to_string())
        };
        assert!(refused(&["--lr", BASE]).is_ok() && refused(&[FROZEN]).is_err());
        for option in SCALE {
            assert!(refused(&["--lora-dropout", option]).unwrap_err().contains(option));
        }
        assert!(
            refused(&["--lr", MODEL])
                .unwrap_err()
                .contains("--checkpoint-dir: got c; the model: not as in that run")
        );
        assert_ne!(settings(100, false)["--lora-rslora"], settings(100, true)["--lora-rslora"]);
    }
}
