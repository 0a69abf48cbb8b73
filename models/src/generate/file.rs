//! Settings of `generation_config.json`.

use std::path::Path;

use serde_json::{Map, Value};

use super::GenerateConfig;
use crate::{Error, ModelConfig, Result, Tokenizer, reading};

const FILE: &str = "generation_config.json";
/// Number of tokens that `transformers` samples from, unless the file says another.
const TOP_K: usize = 50;

/// Fields that change what `transformers` generates and are not supported, with the number with which they change
/// nothing. So do null and false.
const UNSUPPORTED: &[(&str, f64)] = &[
    ("constraints", f64::NAN),
    ("dola_layers", f64::NAN),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("exponential_decay_length_penalty", f64::NAN),
    ("force_words_ids", f64::NAN),
    ("forced_bos_token_id", f64::NAN),
    ("forced_eos_token_id", f64::NAN),
    ("guidance_scale", 1.0),
    ("max_time", f64::NAN),
    ("num_beams", 1.0),
    ("num_return_sequences", 1.0),
    ("penalty_alpha", 0.0),
    ("remove_invalid_values", f64::NAN),
    ("sequence_bias", f64::NAN),
    ("stop_strings", f64::NAN),
    ("token_healing", f64::NAN),
    ("watermarking_config", f64::NAN),
];

/// The same, of fields that matter only where tokens are sampled.
const UNSUPPORTED_IN_SAMPLING: &[(&str, f64)] =
    &[("epsilon_cutoff", 0.0), ("eta_cutoff", 0.0), ("top_h", f64::NAN), ("typical_p", 1.0)];

impl GenerateConfig {
    /// Returns the settings of a folder's `generation_config.json` for a prompt of this many tokens, as `transformers`
    /// applies them, and a description of those that are not supported, if there are any. Without the file the default;
    /// fields that the file does not have are as in `transformers`, but for the number of tokens.
    ///
    /// Where the file does not say `do_sample`, the temperature is 0, and `top_k`, `top_p` and `min_p` matter only with
    /// another one.
    ///
    /// # Errors
    /// A file that cannot be read; a field of another type.
    pub fn from_folder(folder: &Path, prompt: usize) -> Result<(Self, Option<String>)> {
        let path = folder.join(FILE);
        let Some(bytes) = reading::text(folder, FILE)? else { return Ok((Self::default(), None)) };
        let json: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|error| Error::Format { path, problem: format!("it is no JSON: {error}") })?;
        let fields = Fields(&json);
        let default = Self::default();
        let samples = fields.flag("do_sample")?;
        let top_k = fields.count("top_k")?.or(samples.then_some(TOP_K));
        let most = fields.count("max_length")?.map(|length| length.saturating_sub(prompt));
        let least = fields.count("min_length")?.map(|length| length.saturating_sub(prompt));
        let config = Self {
            max_new_tokens: fields.count("max_new_tokens")?.or(most).unwrap_or(default.max_new_tokens),
            min_new_tokens: fields.count("min_new_tokens")?.or(least).unwrap_or_default(),
            temperature: fields
                .number("temperature")?
                .filter(|_| samples)
                .unwrap_or(f64::from(u8::from(samples))),
            top_k: top_k.filter(|k| *k > 0),
            top_p: fields.number("top_p")?.filter(|top_p| *top_p != 1.0),
            min_p: fields.number("min_p")?,
            repetition_penalty: fields.number("repetition_penalty")?.unwrap_or(1.0),
            no_repeat_ngram_size: fields.count("no_repeat_ngram_size")?.unwrap_or_default(),
            bad_words: fields.words("bad_words_ids")?,
            suppress_tokens: fields.tokens("suppress_tokens")?,
            begin_suppress_tokens: fields.tokens("begin_suppress_tokens")?,
            stop: end_tokens(json.get(END)).map_err(|got| end_refused(FILE, got))?,
            ..default
        };
        config.validate().map_err(|error| match error {
            Error::Invalid { field, got, help, .. } => {
                Error::Config { file: FILE, field: field.into(), got, help: help.into() }
            }
            other => other,
        })?;
        let mut unsupported = unsupported(&json, UNSUPPORTED);
        if samples {
            unsupported.extend(self::unsupported(&json, UNSUPPORTED_IN_SAMPLING));
        }
        let note = format!("{FILE}: {} not supported, and ignored", unsupported.join(", "));
        Ok((config, Some(note).filter(|_| !unsupported.is_empty())))
    }

    /// Returns the same; without tokens that end a text, with those of the tokenizer and of the model's configuration.
    ///
    /// # Errors
    /// An `eos_token_id` of the model that is no token's number, nor a list of them.
    pub fn with_ends_of(mut self, model: &ModelConfig, tokenizer: &Tokenizer) -> Result<Self> {
        if !self.stop.is_empty() {
            return Ok(self);
        }
        self.stop.extend(tokenizer.end_of_text());
        self.stop.extend(end_tokens(model.json().get(END)).map_err(|got| end_refused("config.json", got))?);
        Ok(self)
    }
}

/// The field of configurations that lists the tokens at which a text ends.
const END: &str = "eos_token_id";

fn end_refused(file: &'static str, got: String) -> Error {
    Error::Config { file, field: END.into(), got, help: "give a token's number, or a list of numbers".into() }
}

/// Returns none, one, or several tokens. Any other value is the error.
fn end_tokens(given: Option<&Value>) -> std::result::Result<Vec<u32>, String> {
    let given = given.unwrap_or(&Value::Null);
    let number = |number: &Value| number.as_u64().and_then(|number| u32::try_from(number).ok());
    let numbers = match given {
        Value::Null => Some(Vec::new()),
        Value::Array(several) => several.iter().map(number).collect(),
        one => number(one).map(|one| vec![one]),
    };
    numbers.ok_or_else(|| given.to_string())
}

fn unsupported(json: &Map<String, Value>, fields: &[(&str, f64)]) -> Vec<String> {
    let found = fields.iter().filter_map(|(name, neutral)| {
        let value = json.get(*name)?;
        let is_neutral = value.is_null() || *value == Value::Bool(false) || value.as_f64() == Some(*neutral);
        (!is_neutral).then(|| format!("{name} {value}"))
    });
    found.collect()
}

/// Fields of the file; null is no value.
struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    fn get<T>(&self, name: &str, read: impl Fn(&Value) -> Option<T>, help: &str) -> Result<Option<T>> {
        let Some(value) = self.0.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
        let refused =
            || Error::Config { file: FILE, field: name.into(), got: value.to_string(), help: help.into() };
        read(value).ok_or_else(refused).map(Some)
    }

    fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.get(name, Value::as_bool, "give true or false")?.unwrap_or_default())
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        self.get(name, Value::as_f64, "give a number")
    }

    fn count(&self, name: &str) -> Result<Option<usize>> {
        self.get(name, |value| Some(value.as_u64()? as usize), "give a whole number, 0 or more")
    }

    fn tokens(&self, name: &str) -> Result<Vec<u32>> {
        Ok(self.get(name, tokens, "give a list of tokens' numbers")?.unwrap_or_default())
    }

    fn words(&self, name: &str) -> Result<Vec<Vec<u32>>> {
        let words = |value: &Value| value.as_array()?.iter().map(tokens).collect();
        Ok(self.get(name, words, "give a list of lists of tokens' numbers")?.unwrap_or_default())
    }
}

/// Returns a list's tokens; numbers that no token has, such as -1, are none.
fn tokens(value: &Value) -> Option<Vec<u32>> {
    let numbers: Option<Vec<i64>> = value.as_array()?.iter().map(Value::as_i64).collect();
    Some(numbers?.into_iter().filter_map(|number| u32::try_from(number).ok()).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(json: Value, prompt: usize) -> Result<(GenerateConfig, Option<String>)> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), json.to_string()).unwrap();
        GenerateConfig::from_folder(dir.path(), prompt)
    }

    #[test]
    fn lengths_and_sampling_are_those_of_transformers() {
        let of = |json, prompt| read(json, prompt).unwrap().0;
        assert_eq!(of(json!({}), 5), GenerateConfig::default());
        assert_eq!(of(json!({"max_length": 30}), 5).max_new_tokens, 25);
        assert_eq!(of(json!({"max_length": 30}), 40).max_new_tokens, 0);
        assert_eq!(of(json!({"max_length": 30, "max_new_tokens": 7}), 5).max_new_tokens, 7);
        assert_eq!(of(json!({"min_length": 9}), 5).min_new_tokens, 4);
        assert_eq!(of(json!({"eos_token_id": 4}), 5).stop, [4]);
        let of = |json| {
            let GenerateConfig { temperature, top_k, top_p, .. } = of(json, 1);
            (temperature, top_k, top_p)
        };
        assert_eq!(of(json!({"do_sample": true})), (1.0, Some(50), None));
        let all = json!({"do_sample": true, "temperature": 0.6, "top_k": 0, "top_p": 0.9});
        assert_eq!(of(all), (0.6, None, Some(0.9)));
        assert_eq!(of(json!({"temperature": 0.6, "top_k": 20})), (0.0, Some(20), None));
    }

    #[test]
    fn the_file_says_what_ends_a_text_and_without_it_the_model() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama").as_ref();
        let (model, tokenizer) = (ModelConfig::from_folder(folder).unwrap(), Tokenizer::bytes().unwrap());
        let stop = |json| read(json, 1).unwrap().0.with_ends_of(&model, &tokenizer).unwrap().stop;
        assert_eq!(stop(json!({"eos_token_id": [4, 5]})), [4, 5]);
        for none in [json!({}), json!({"eos_token_id": null})] {
            assert!(stop(none).contains(&256));
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let note = |json| read(json, 1).unwrap().1;
        assert_eq!(note(json!({"num_beams": 1, "typical_p": 0.5, "max_time": null, "top_h": null})), None);
        assert_eq!(note(json!({"bos_token_id": 1, "cache_implementation": "hybrid", "user": 3})), None);
        let json = json!({"num_beams": 4, "typical_p": 0.5, "do_sample": true, "stop_strings": ["x"]});
        let said = "generation_config.json: num_beams 4, stop_strings [\"x\"], typical_p 0.5 not supported, and ignored";
        assert_eq!(note(json).unwrap(), said);
        let json = json!({"encoder_repetition_penalty": 1.5});
        let said = "generation_config.json: encoder_repetition_penalty 1.5 not supported, and ignored";
        assert_eq!(note(json).unwrap(), said);
        for (json, field) in [
            (json!({"do_sample": "yes"}), "do_sample"),
            (json!({"do_sample": true, "top_p": 1.5}), "top_p"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"bad_words_ids": [1]}), "bad_words_ids"),
            (json!({"repetition_penalty": 0.0}), "repetition_penalty"),
            (json!({"eos_token_id": "</s>"}), "eos_token_id"),
        ] {
            let line = read(json, 1).unwrap_err().to_string();
            assert!(line.contains(field), "{line}");
        }
    }
}
