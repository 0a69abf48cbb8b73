//! Options of adapters (LoRA).

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::options::{check_once, check_rank, count};
use clap::Args;
use models::{Lora, LoraConfig, ModelConfig, Weights};
use ops::quantized::Format;
use plan::command::{base_format, pattern};

use super::options::TrainOptions;

/// Options of adapters.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Adapters")]
pub(super) struct AdapterOptions {
    /// Rank of adapters (LoRA) [default: no adapters]
    #[arg(long, value_name = "N", value_parser = count)]
    pub(super) lora_rank: Option<usize>,
    /// Alpha of adapters [default: twice the rank]
    ///
    /// Adapters are scaled by alpha / rank.
    #[arg(long, value_name = "A", value_parser = finite, requires = "lora_rank")]
    lora_alpha: Option<f64>,
    /// Layers with adapters
    ///
    /// The ends of their names, such as q_proj; all-linear stands for all linear layers but the output and experts. Those of experts
    /// are experts.gate_up_proj and experts.down_proj.
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "all-linear",
        requires = "lora_rank"
    )]
    lora_targets: Vec<String>,
    /// Probability of dropout before adapters
    #[arg(
        long,
        value_name = "P",
        default_value = "0",
        value_parser = crate::options::probability,
        requires = "lora_rank"
    )]
    lora_dropout: f64,
    /// Scale adapters by alpha / sqrt(rank) (rsLoRA)
    #[arg(long, requires = "lora_rank")]
    lora_rslora: bool,
    /// Train a magnitude for each output, too (DoRA)
    #[arg(long, requires = "lora_rank")]
    lora_dora: bool,
    /// Other ranks, such as q_proj=8,down_proj=32
    ///
    /// Layers are given by the ends of their names, or by regular expressions for these: layers\.0\..*=4. Of several that match a
    /// layer, the first in alphabetical order counts.
    #[arg(long, value_name = "NAME=N", value_delimiter = ',', value_parser = pattern::<usize>, requires = "lora_rank")]
    lora_rank_pattern: Vec<(String, usize)>,
    /// Other alphas, such as q_proj=8,down_proj=64
    ///
    /// Layers are given as for --lora-rank-pattern.
    #[arg(long, value_name = "NAME=A", value_delimiter = ',', value_parser = pattern::<f64>, requires = "lora_rank")]
    lora_alpha_pattern: Vec<(String, f64)>,
    /// Modules to train whole: embed_tokens, lm_head
    ///
    /// The embedding (of GPT-2: wte) and the output, which are saved with the adapters. Where the model ties them, each stands for
    /// both. A head for labels (score) always is one of them.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "lora_rank")]
    lora_save_modules: Vec<String>,
    /// Folder of adapters to continue with
    ///
    /// It has an adapter_config.json.
    #[arg(
        long,
        value_name = "DIR",
        conflicts_with_all = [
            "lora_rank",
            "lora_alpha",
            "lora_targets",
            "lora_dropout",
            "lora_rslora",
            "lora_dora",
            "lora_rank_pattern",
            "lora_alpha_pattern",
            "lora_save_modules",
        ]
    )]
    pub(super) adapters: Option<PathBuf>,
    /// Save the whole model, with adapters merged into it
    #[arg(long)]
    pub(super) merge: bool,
    /// Bits of the base's weights: 4 or 8 [default: all]
    ///
    /// The weights of the blocks' linear layers are quantized while they are read, as bitsandbytes does: 4 is the format of QLoRA
    /// (NF4 with double quantization), 8 that of LLM.int8 (a scale for each row). Embedding, output, norms and biases are not.
    /// Adapters are trained beside them. With --merge they are merged into the weights as these bits hold them.
    #[arg(long, value_name = "BITS", value_parser = base_format)]
    base_bits: Option<Format>,
}

impl AdapterOptions {
    /// Returns the adapters for a model; `None` if all of it is trained.
    ///
    /// # Errors
    /// A folder that cannot be used; options that do not fit.
    pub(super) fn lora(&self, weights: &Weights, options: &TrainOptions) -> Result<Option<Lora>> {
        let base_bits = self.asked_bits(weights)?;
        match (self.adapters_of(weights)?, base_bits) {
            (None, None) => self.check_is_trained(weights).map(|()| None),
            (Some(lora), None) => {
                // There is no kernel for other devices so far: such weights are widened there.
                if !options.common().device()?.is_cpu() {
                    return Ok(Some(lora));
                }
                let lora = lora.quantized_as(&weights.formats())?;
                lora.base_format().map_or(Ok(()), |format| check_base(format, weights.config(), options))?;
                Ok(Some(lora))
            }
            (Some(lora), Some(format)) => {
                check_base(format, weights.config(), options)?;
                Ok(Some(lora.quantized(format)?))
            }
            (None, Some(format)) => {
                let bits = format.bits();
                let help = format!(
                    "a base in {bits} bits is not trained itself: give --lora-rank or --adapters, which are, or leave it out"
                );
                Err(Error::Option { option: "--base-bits", got: bits.to_string(), help })
            }
        }
    }

    /// Returns the format to quantize to: none, if the folder has its weights in as many bits.
    fn asked_bits(&self, weights: &Weights) -> Result<Option<Format>> {
        match (self.base_bits, weights.bits()) {
            (Some(format), Some(bits)) if format.bits() != bits => {
                let help = format!(
                    "--model has its weights in {bits} bits, which are taken as they are: leave it out"
                );
                Err(Error::Option { option: "--base-bits", got: format.bits().to_string(), help })
            }
            (_, Some(_)) => Ok(None),
            (asked, None) => Ok(asked),
        }
    }

    /// Refuses to train weights that are quantized in their file.
    fn check_is_trained(&self, weights: &Weights) -> Result<()> {
        let Some(got) = weights.quantized() else { return Ok(()) };
        let help = format!(
            "its weights are quantized ({got}), and not trained: give --lora-rank, and adapters are trained beside them, or a model in f32, f16 or bf16"
        );
        Err(Error::Option { option: "--model", got: "quantized weights".into(), help })
    }

    /// Whether adapters alone are saved.
    pub(super) fn saves_adapters(&self) -> bool {
        (self.lora_rank.is_some() || self.adapters.is_some()) && !self.merge
    }

    fn adapters_of(&self, weights: &Weights) -> Result<Option<Lora>> {
        if let Some(folder) = &self.adapters {
            return Ok(Some(Lora::from_folder(folder, weights.config())?));
        }
        let Some(rank) = self.lora_rank else {
            if self.merge {
                let help = "there are no adapters to merge: give --lora-rank or --adapters".into();
                return Err(Error::Option { option: "--merge", got: "true".into(), help });
            }
            return Ok(None);
        };
        check_rank(rank)?;
        check_once("--lora-rank-pattern", &self.lora_rank_pattern)?;
        check_once("--lora-alpha-pattern", &self.lora_alpha_pattern)?;
        let config = LoraConfig {
            rank,
            rank_pattern: self.lora_rank_pattern.iter().cloned().collect(),
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            alpha_pattern: self.lora_alpha_pattern.iter().cloned().collect(),
            targets: self.lora_targets.clone(),
            by_root: self.lora_rslora,
            dora: self.lora_dora,
            dropout: self.lora_dropout,
            save_modules: self.lora_save_modules.clone(),
            ..LoraConfig::default()
        };
        Ok(Some(Lora::new(&config, weights.config())?))
    }
}

/// Refuses what a base in few bits cannot be divided over or computed on.
fn check_base(format: Format, model: &ModelConfig, options: &TrainOptions) -> Result<()> {
    let (bits, block) = (format.bits(), format.block());
    let refuse = |option, got: String, help: String| Err(Error::Option { option, got, help });
    if !options.common().device()?.is_cpu() {
        let help = format!(
            "a base in {bits} bits is computed on a CPU only, so far: leave out --base-bits, or give --device cpu"
        );
        return refuse("--base-bits", bits.to_string(), help);
    }
    let Some(layout) = &options.mesh else { return Ok(()) };
    let is_odd = |(_, width): &(&str, usize)| !(width / block).is_multiple_of(layout.tp);
    match model.divided_inputs().into_iter().find(is_odd) {
        None => Ok(()),
        Some((field, width)) => {
            let (blocks, tp) = (width / block, layout.tp);
            let help = format!(
                "{field} of {width} in {bits} bits: the number of its blocks of {block}, {blocks}, cannot be divided over tp={tp} ranks"
            );
            refuse("--mesh", layout.to_string(), help)
        }
    }
}

fn finite(text: &str) -> std::result::Result<f64, &'static str> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number != 0.0);
    number.ok_or("give a finite number other than 0, with which adapters would change nothing")
}
