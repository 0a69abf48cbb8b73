//! Strict reader of the fields of a JSON configuration: each field is read, known to have no effect here, or an error.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::{Error, Result};

/// Fields that have no effect here: tokenization, generation, names of files and labels, options of other programs.
const IGNORED_FIELDS: &[&str] = &[
    "_attn_implementation_autoset", "_name_or_path", "_num_labels", "architectures", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cls_token_id",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder",
    "is_encoder_decoder", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "length_penalty",
    "mask_token_id", "max_length", "max_sequence_length", "min_length", "model_type", "n_ctx", "n_special",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "predict_special_tokens",
    "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "reorder_and_upcast_attn",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj", "suppress_tokens",
    "task_specific_params", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attn",
    "use_return_dict",
];

/// Field that names code in the folder, which transformers runs only where it is told to trust it.
const AUTO_MAP: &str = "auto_map";

/// Names of dropout probabilities.
const DROPOUT: &[&str] = &["attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"];

/// Reader of a JSON object that records which fields were read.
pub(crate) struct Fields<'a> {
    file: &'static str,
    /// What is configured; for messages.
    of: String,
    /// Path of the object within the file, put before field names in messages.
    prefix: String,
    /// Names of fields that have no effect.
    harmless: &'static [&'static str],
    json: &'a Map<String, Value>,
    read: BTreeSet<String>,
}

impl<'a> Fields<'a> {
    /// Returns a reader of a model's `config.json`.
    pub(super) fn of_model(family: super::Family, json: &'a Map<String, Value>) -> Self {
        Self::new("config.json", family.to_string(), IGNORED_FIELDS, json)
    }

    pub(crate) fn new(
        file: &'static str,
        of: String,
        harmless: &'static [&'static str],
        json: &'a Map<String, Value>,
    ) -> Self {
        Self { file, of, prefix: String::new(), harmless, json, read: BTreeSet::new() }
    }

    /// Returns a reader of the object in a field; `None` if the field is missing or null.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields<'a>>> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(json)) => {
                let prefix = format!("{}{name}.", self.prefix);
                let (of, read) = (self.of.clone(), BTreeSet::new());
                Ok(Some(Fields { file: self.file, of, prefix, harmless: &[], json, read }))
            }
            Some(other) => Err(self.invalid_value(name, other, "it must be an object or null")),
        }
    }

    /// Returns a field's value; `None` if it is missing or null.
    pub(crate) fn value(&mut self, name: &str) -> Option<&'a Value> {
        self.read.insert(name.to_string());
        self.json.get(name).filter(|value| !value.is_null())
    }

    /// Returns the names of all fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &'a String> + use<'a> {
        self.json.keys()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.json.contains_key(name)
    }

    /// Reads a whole number that must be present.
    pub(crate) fn size(&mut self, name: &str) -> Result<usize> {
        match self.optional_size(name)? {
            Some(size) => Ok(size),
            None => Err(self.config_error(name, "missing", "give a whole number")),
        }
    }

    pub(crate) fn optional_size(&mut self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        // The limit keeps products of sizes from overflowing.
        match size.filter(|size| *size <= 1 << 31) {
            Some(size) => Ok(Some(size)),
            None => Err(self.invalid_value(name, value, "it must be a whole number up to 2^31")),
        }
    }

    /// Reads the number of blocks. It is limited because memory is allocated for each block before any weight is read.
    pub(crate) fn layers(&mut self, name: &str) -> Result<usize> {
        let layers = self.size(name)?;
        match layers <= 1 << 16 {
            true => Ok(layers),
            false => Err(self.config_error(name, &layers.to_string(), "it must be at most 65536")),
        }
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.invalid_value(name, value, "it must be a number"))
    }

    /// Reads a finite number above 0.
    pub(crate) fn above_zero(&mut self, name: &str) -> Result<Option<f64>> {
        self.within(name, |got| got > 0.0, "it must be a finite number above 0")
    }

    /// Reads a finite number, 0 or more.
    pub(crate) fn not_negative(&mut self, name: &str) -> Result<Option<f64>> {
        self.within(name, |got| got >= 0.0, "it must be a finite number, 0 or more")
    }

    /// Reads a number that satisfies `holds` and is finite in f32, in which models compute.
    fn within(&mut self, name: &str, holds: impl Fn(f64) -> bool, help: &str) -> Result<Option<f64>> {
        match self.number(name)? {
            Some(got) if !(got as f32).is_finite() || !holds(got) => {
                Err(self.config_error(name, &got.to_string(), help))
            }
            got => Ok(got),
        }
    }

    /// Reads a number from 0 to 1.
    pub(crate) fn probability(&mut self, name: &str, default: f64) -> Result<f64> {
        let got = self.number(name)?.unwrap_or(default);
        match (0.0..=1.0).contains(&got) {
            true => Ok(got),
            false => Err(self.config_error(name, &got.to_string(), "it must be a number from 0 to 1")),
        }
    }

    pub(crate) fn flag(&mut self, name: &str, default: bool) -> Result<bool> {
        let Some(value) = self.value(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.invalid_value(name, value, "it must be true or false"))
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.invalid_value(name, value, "it must be a string"))
    }

    /// Refuses any value but this one; the field may be missing.
    pub(crate) fn require_supported(&mut self, name: &str, supported: &Value) -> Result<()> {
        match self.value(name) {
            // 1 and 1.0 are equal.
            Some(got)
                if got != supported && got.as_f64().is_none_or(|got| supported.as_f64() != Some(got)) =>
            {
                Err(self.invalid_value(name, got, &format!("supported is {supported}")))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn invalid_value(&self, name: &str, got: &Value, help: &str) -> Error {
        self.config_error(name, &got.to_string(), help)
    }

    pub(crate) fn config_error(&self, name: &str, got: &str, help: &str) -> Error {
        Error::Config {
            file: self.file,
            field: format!("{}{name}", self.prefix),
            got: got.into(),
            help: help.into(),
        }
    }

    /// Refuses fields that were neither read nor known to have no effect; returns notes about fields that are not
    /// applied.
    pub(crate) fn finish(self) -> Result<Vec<String>> {
        let (mut notes, mut unknown) = (Vec::new(), Vec::new());
        for (name, value) in self.json {
            let is_known = self.read.contains(name) || self.harmless.contains(&&**name);
            if is_known || is_null_false_or_empty(value) {
                continue;
            }
            if self.prefix.is_empty() && name == AUTO_MAP {
                notes.push(format!(
                    "{AUTO_MAP} names code of the folder, which is not run: the model is taken for a {}",
                    self.of
                ));
                continue;
            }
            if DROPOUT.contains(&&**name) && value.is_number() {
                if value.as_f64() != Some(0.0) {
                    notes.push(format!("{name} of {value} is not applied: {} has no such dropout", self.of));
                }
                continue;
            }
            unknown.push(format!("{}{name} ({value})", self.prefix));
        }
        if unknown.is_empty() {
            return Ok(notes);
        }
        let fields = match &unknown[..] {
            [one] => format!("the field {one} is"),
            several => format!("the fields {} are", several.join(", ")),
        };
        Err(Error::UnknownFields { file: self.file, fields, of: self.of })
    }
}

/// Whether a value is null, false or empty.
fn is_null_false_or_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
