//! `export`: writes a model as a GGUF file, or as a folder in another type.

use std::path::{Path, PathBuf};

use candle_core::DType;
use clap::{Args, ValueEnum};
use models::tokens::NamedTemplate;
use models::{
    FolderConfig, FolderWriter, GgufFile, GgufType, Lora, MergedWeights, Weights, WrittenFiles, export_gguf,
    export_gguf_adapters,
};

use crate::console::{note, say};
use crate::error::{Error, Result};
use crate::outputs;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// A file that llama.cpp and Ollama run.
    Gguf,
    /// A folder that transformers reads.
    Transformers,
}

/// Options of `export`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
A GGUF file has the model, its tokenizer and its chat template: llama.cpp, Ollama and others run it.
Norms, biases, routers and learned positions are f32 in it whatever the matrices are; with a type of
4 bits the head has 6. With --adapters their change is merged into the weights; with --adapters-only
the file has only them, for `llama-cli --lora`.

  girandole export --model out --out model.gguf --type q4_k
  girandole export --model base --adapters out --out merged --to transformers --type bf16")]
pub struct ExportOptions {
    /// Hugging Face folder of the model, or GGUF file
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// File, or with --to transformers folder, to write
    #[arg(long, value_name = "PATH")]
    out: PathBuf,
    /// Adapters (LoRA) to merge: a folder of finetune or peft
    #[arg(long, value_name = "DIR")]
    adapters: Option<PathBuf>,
    /// Write the adapters alone, in f32
    #[arg(long, requires = "adapters", conflicts_with = "dtype")]
    adapters_only: bool,
    /// What to write
    #[arg(long, value_enum, value_name = "FORMAT", default_value = "gguf")]
    to: Format,
    /// Type of weights [default: f16, or in a folder the model's]
    ///
    /// f32, f16 or bf16; of a GGUF file also q8_0 (8.5 bits a weight), q4_0 (4.5) or q4_k (4.5, closer to the model).
    #[arg(long = "type", id = "dtype", value_name = "TYPE")]
    dtype: Option<GgufType>,
    /// Largest file of a folder [default: 5GB]
    #[arg(long, value_name = "BYTES", value_parser = plan::units::bytes)]
    max_file_size: Option<f64>,
    /// Replace the model in the folder --out
    #[arg(long)]
    overwrite: bool,
}

impl ExportOptions {
    /// Runs the command.
    ///
    /// # Errors
    /// A folder that cannot be used, or whose model or tokenizer the format cannot express; files that cannot be written.
    pub fn run(&self) -> Result<()> {
        self.check_out()?;
        let model = match &self.adapters {
            Some(adapters) => Weights::for_adapters(&self.model, adapters)?,
            None => Weights::folder(&self.model)?,
        };
        let lora =
            self.adapters.as_ref().map(|folder| Lora::from_folder(folder, model.config())).transpose()?;
        let weights = match (&self.adapters, &lora) {
            (Some(folder), Some(lora)) => model.with_adapters(folder, lora)?,
            _ => model,
        };
        match self.to {
            Format::Gguf => self.write_gguf(&weights, lora.as_ref()),
            Format::Transformers => self.write_folder(&weights, lora.as_ref()),
        }
    }

    /// Returns the chat template to write in place of that of the model's folder: the adapters', if they have one.
    fn chat_template(&self) -> Result<Option<NamedTemplate>> {
        Ok(NamedTemplate::chosen(None, self.adapters.as_deref())?)
    }

    /// Checks that what is read is not replaced, nor another model unless that is asked for.
    fn check_out(&self) -> Result<()> {
        let refuse =
            |help: String| Err(Error::Option { option: "--out", got: self.out.display().to_string(), help });
        let out = self.out.canonicalize().ok();
        let is_out = |path: &Path| out.is_some() && path.canonicalize().ok() == out;
        if is_out(&self.model) {
            return refuse("it is the model itself: give another path".into());
        }
        if self.adapters.as_deref().is_some_and(is_out) {
            return refuse("it is the folder of the adapters: give another path".into());
        }
        match models::weights_in(&self.out) {
            Some(file) if self.to == Format::Transformers && !self.overwrite => refuse(format!(
                "it holds a model already ({file}): give another folder, or --overwrite to replace the model"
            )),
            _ => Ok(()),
        }
    }

    fn write_gguf(&self, weights: &Weights, lora: Option<&Lora>) -> Result<()> {
        if let Some(size) = self.max_file_size {
            let help = "a GGUF file is one file: leave it out, or add --to transformers".into();
            return Err(Error::Option { option: "--max-file-size", got: size.to_string(), help });
        }
        if self.out.is_dir() {
            let help = "it is a folder: give the path of a file, such as model.gguf".into();
            return Err(Error::Option { option: "--out", got: self.out.display().to_string(), help });
        }
        training::internal::check_writable(&self.out)?;
        let written = match (lora, self.adapters_only) {
            (Some(lora), true) => export_gguf_adapters(&self.out, weights, lora)?,
            _ => {
                let dtype = self.dtype.unwrap_or(GgufType::F16);
                let (merged, template) = (MergedWeights::new(weights, lora), self.chat_template()?);
                export_gguf(&self.out, &merged, &self.model, template.as_ref(), dtype)?
            }
        };
        let GgufFile { tensors, bytes, wider, notes, .. } = written;
        notes.iter().for_each(|line| note(format_args!("{line}")));
        if let Some(first) = wider.first() {
            note(format_args!(
                "{} of {tensors} tensors have a wider type, since no block of this one divides their rows: {first}{}",
                wider.len(),
                if wider.len() > 1 { " and others" } else { "" }
            ));
        }
        say(format_args!("tensors: {tensors}, bytes: {bytes}"))
    }

    fn write_folder(&self, weights: &Weights, lora: Option<&Lora>) -> Result<()> {
        let refuse = |option, got: String, help: &str| Err(Error::Option { option, got, help: help.into() });
        if self.adapters_only {
            let help = "the adapters' folder has them already: leave it out to merge them, or leave out --to";
            return refuse("--adapters-only", "set".into(), help);
        }
        let dtype = self.dtype.and_then(GgufType::dtype);
        if let (Some(got), None) = (self.dtype, dtype) {
            let help = "a folder has f32, f16 or bf16: take one of them, or leave out --to";
            return refuse("--type", got.to_string(), help);
        }
        outputs::make_folder(&self.out)?;
        let template = self.chat_template()?;
        let how = FolderConfig {
            dtype,
            dtypes_of: Some(weights.clone()),
            tokenizer_of: Some(self.model.clone()),
            template: template.clone(),
            max_file_bytes: self
                .max_file_size
                .map_or(FolderConfig::default().max_file_bytes, |size| size as usize),
        };
        let merged = MergedWeights::new(weights, lora);
        let mut writer = FolderWriter::begin(&self.out, weights.config(), DType::F32, &how)?;
        for name in weights.shapes().keys() {
            writer.write(name, &merged.get(name)?)?;
        }
        // Not before all tensors are written: until then the folder keeps an older model as it is.
        let replaces = models::weights_in(&self.out).is_some();
        let written = WrittenFiles::begin(&self.out, Some(&self.model), template.as_ref(), replaces)?;
        writer.finish()?;
        let stayed = written.finish()?;
        if !stayed.is_empty() {
            let (stayed, out) = (stayed.join(", "), self.out.display());
            note(format_args!("in {out}, {stayed} are not this model's: it is used with them"));
        }
        say(format_args!("tensors: {}", weights.shapes().len()))
    }
}
