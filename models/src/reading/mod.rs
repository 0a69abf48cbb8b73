//! What a model's folder says of model and tokenizer, or a GGUF file in place of the folder.

pub(crate) mod gguf;

use std::path::Path;

use serde_json::{Map, Value};

use crate::tokenizer::{CONFIG, FILE, SPECIAL};
use crate::{Error, ModelConfig, Result, Tokenizer};

/// Reads a text file of a model: of its folder, or what a GGUF file has in place of it. `None` if there is none.
pub(crate) fn text(model: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let path = model.join(name);
    match gguf::is_file(model) {
        true => gguf::text_file(model, name),
        false => path.exists().then(|| Error::read(&path)).transpose(),
    }
}

/// Whether a model is given as a GGUF file: by its ending, or by how it begins.
pub fn is_gguf(model: &Path) -> bool {
    gguf::is_file(model)
}

impl ModelConfig {
    /// Reads `config.json` of a folder, or what a GGUF file says in place of it.
    ///
    /// # Errors
    /// A folder without that file; those of [`from_json`](Self::from_json).
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let bytes = text(folder, "config.json")?.map_or_else(|| Error::read(&path), Ok)?;
        match std::str::from_utf8(&bytes) {
            Ok(text) => Self::from_json(text),
            Err(error) => Err(Error::Format { path, problem: error.to_string() }),
        }
    }
}

impl Tokenizer {
    /// Loads the tokenizer of a folder, or of a GGUF file.
    ///
    /// # Errors
    /// A `tokenizer.json` that is missing or not supported.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Ok(Self::with_json(folder)?.0)
    }

    /// Whether a folder, or a GGUF file, has a tokenizer.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn is_in(folder: &Path) -> Result<bool> {
        Ok(text(folder, FILE)?.is_some())
    }

    /// Loads the tokenizer of a folder, and the JSON that it is made of.
    pub(crate) fn with_json(folder: &Path) -> Result<(Self, Value)> {
        let path = folder.join(FILE);
        let bytes = match (text(folder, FILE)?, Self::missing(folder)) {
            (Some(bytes), _) => bytes,
            (None, Some(problem)) => return Err(Error::Format { path: folder.into(), problem }),
            (None, None) => Error::read(&path)?,
        };
        let refuse = |problem: String| Error::Format { path: path.clone(), problem };
        let json: Value = serde_json::from_slice(&bytes).map_err(|error| refuse(error.to_string()))?;
        let tokenizer = Self::of_json(&bytes, &json).map_err(refuse)?;
        Ok((tokenizer.with_settings(&read_config(folder)?, folder)?, json))
    }

    /// Says that a folder has no `tokenizer.json`, and how its other files become one; `None` without such files.
    pub(crate) fn missing(folder: &Path) -> Option<String> {
        if gguf::is_file(folder) {
            return Some("it has no tokenizer: give the model's folder".into());
        }
        let has = |names: &[&str]| names.iter().all(|name| folder.join(name).exists());
        let others: [&[&str]; 3] = [&["vocab.json", "merges.txt"], &["tokenizer.model"], &["vocab.txt"]];
        let other = others.into_iter().find(|names| has(names))?.join(" and ");
        let folder = folder.display();
        Some(format!(
            "there is no {FILE}, but {other}; with transformers, `python -c \"from transformers import AutoTokenizer as T; \
             T.from_pretrained('{folder}').save_pretrained('{folder}')\"` writes it"
        ))
    }
}

/// Reads a folder's `tokenizer_config.json`, with the special tokens of `special_tokens_map.json` where transformers
/// takes those; empty if there is neither.
pub(crate) fn read_config(folder: &Path) -> Result<Map<String, Value>> {
    let read = |name: &str| {
        let Some(bytes) = text(folder, name)? else { return Ok(Map::new()) };
        serde_json::from_slice(&bytes)
            .map_err(|error| Error::Format { path: folder.join(name), problem: error.to_string() })
    };
    let mut config: Map<String, Value> = read(CONFIG)?;
    if !config.contains_key("added_tokens_decoder") {
        config.extend(read(SPECIAL)?);
    }
    Ok(config)
}

/// Returns the token by which other programs fill up rows with this model: that of its tokenizer or its configuration, or else the
/// one that ends a text, as TRL does.
pub fn pad_token(model: &ModelConfig, tokenizer: Option<&Tokenizer>) -> Option<u32> {
    let own = || model.json().get("pad_token_id").and_then(serde_json::Value::as_u64);
    let of_tokenizer = tokenizer.and_then(Tokenizer::padding);
    of_tokenizer.or_else(|| own().map(|token| token as u32)).or_else(|| tokenizer?.end_of_text())
}
