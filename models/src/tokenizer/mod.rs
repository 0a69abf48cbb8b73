//! Tokenizer: text to tokens and back.

mod byte_or_char;
mod stream;

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, ModelConfig, Result};

pub(crate) use byte_or_char::byte_alphabet;
use byte_or_char::description;
pub use stream::TextStream;

pub(crate) const FILE: &str = "tokenizer.json";
pub(crate) const CONFIG: &str = "tokenizer_config.json";
pub(crate) const SPECIAL: &str = "special_tokens_map.json";

/// End-of-text token of the byte and character tokenizers.
pub(crate) const END: &str = "<|endoftext|>";

/// Tokenizer: that of a folder's `tokenizer.json`, or without one, a token per byte or per character. All are saved as
/// `tokenizer.json`, which transformers reads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    kind: Kind,
    end: Option<u32>,
    pad: Option<u32>,
}

/// Tokenizers with a faster way to encode, which is also an error for characters that have no token.
enum Kind {
    General,
    Bytes,
    Characters(HashMap<char, u32>),
}

impl Tokenizer {
    /// The same with the special tokens of a folder's `tokenizer_config.json`.
    pub(crate) fn with_settings(mut self, config: &Map<String, Value>, folder: &Path) -> Result<Self> {
        if let Some(given) = config.get("eos_token") {
            self.end = self.end_of(given, folder)?;
        }
        self.check_added(config, folder)?;
        let pad = config.get("pad_token").and_then(text_of_token);
        self.pad = pad.and_then(|text| self.inner.token_to_id(text));
        Ok(self)
    }

    /// Refuses tokens that `tokenizer_config.json` alone has, which transformers would add.
    fn check_added(&self, config: &Map<String, Value>, folder: &Path) -> Result<()> {
        let added = config.get("added_tokens_decoder").and_then(Value::as_object);
        let added = added.into_iter().flat_map(Map::values).map(|token| ("added_tokens_decoder", token));
        let pad = config.get("pad_token").map(|token| ("pad_token", token));
        let mut texts = added.chain(pad).filter_map(|(field, token)| Some((field, text_of_token(token)?)));
        match texts.find(|(_, text)| self.inner.token_to_id(text).is_none()) {
            None => Ok(()),
            Some((field, text)) => Err(Error::Format {
                path: folder.join(CONFIG),
                problem: format!(
                    "`{field}` has the token {text:?}, and {FILE} does not; transformers' AutoTokenizer adds it, and its \
                     save_pretrained writes both files"
                ),
            }),
        }
    }

    /// Reads a `tokenizer.json`.
    pub(crate) fn of_json(bytes: &[u8], json: &Value) -> std::result::Result<Self, String> {
        Self::from_bytes(bytes, byte_or_char::kind(json))
    }

    /// Returns a tokenizer with a token per byte and an end-of-text token: 257.
    ///
    /// # Errors
    /// None are known.
    ///
    /// ```
    /// let tokenizer = models::Tokenizer::bytes()?;
    /// assert_eq!(tokenizer.encode("é!")?, [0xc3, 0xa9, 33]);
    /// assert_eq!((tokenizer.decode(&[0xc3, 0xa9, 33])?, tokenizer.len()), ("é!".to_string(), 257));
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn bytes() -> Result<Self> {
        let alphabet = byte_alphabet();
        Self::from_json(description(&alphabet, true), Kind::Bytes)
    }

    /// Returns a tokenizer with a token per character of a text, in order of code points, and an end-of-text token.
    ///
    /// # Errors
    /// A text without characters.
    ///
    /// ```
    /// let tokenizer = models::Tokenizer::characters("banana\n")?;
    /// assert_eq!(tokenizer.encode("nab\n")?, [3, 1, 2, 0]);
    /// assert!(tokenizer.encode("bean").unwrap_err().to_string().contains("'e'"));
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn characters(text: &str) -> Result<Self> {
        let mut all: Vec<char> = text.chars().collect();
        all.sort_unstable();
        all.dedup();
        if all.is_empty() {
            let (what, help) = ("a tokenizer of characters", "give one with all characters");
            return Err(Error::Invalid { what, field: "the text", got: "empty".into(), help });
        }
        let kind = Kind::Characters(all.iter().copied().zip(0..).collect());
        Self::from_json(description(&all, false), kind)
    }

    fn from_json(description: Value, kind: Kind) -> Result<Self> {
        let refuse = |problem| Error::Format { path: FILE.into(), problem };
        Self::from_bytes(description.to_string().as_bytes(), kind).map_err(refuse)
    }

    fn from_bytes(bytes: &[u8], kind: Kind) -> std::result::Result<Self, String> {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| one_line(&*error))?;
        // Rows are truncated and padded elsewhere.
        inner.with_truncation(None).map_err(|error| one_line(&*error))?;
        inner.with_padding(None);
        let end =
            [END, "</s>", "<|end_of_text|>", "<|im_end|>"].iter().find_map(|end| inner.token_to_id(end));
        Ok(Self { inner, kind, end, pad: None })
    }

    /// Returns the token that ends a text by the `eos_token` of a folder's files; null is none.
    fn end_of(&self, given: &Value, folder: &Path) -> Result<Option<u32>> {
        match text_of_token(given).and_then(|text| self.inner.token_to_id(text)) {
            None if !given.is_null() => Err(Error::Format {
                path: folder.join(CONFIG),
                problem: format!(
                    "`eos_token` is {given}, here or in {SPECIAL}; give the text of a token that {FILE} has, or null"
                ),
            }),
            token => Ok(token),
        }
    }

    /// Whether another tokenizer has the same tokens with the same numbers.
    pub fn has_same_tokens(&self, other: &Self) -> bool {
        self.inner.get_vocab(true) == other.inner.get_vocab(true)
    }

    /// Returns the size of the vocabulary: the highest token id plus 1.
    #[allow(clippy::len_without_is_empty, reason = "an empty vocabulary has no use")]
    pub fn len(&self) -> usize {
        // Token ids may have gaps.
        self.inner.get_vocab(true).into_values().max().map_or(0, |last| last as usize + 1)
    }

    /// Returns the end-of-text token, if there is one.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end
    }

    /// Returns the token that fills up rows in other programs (`pad_token`), if the folder names one.
    pub fn padding(&self) -> Option<u32> {
        self.pad
    }

    /// Returns the id of a token by its text.
    pub fn token(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// Returns the tokens of a text, without adding special tokens at its beginning or end. Names of special tokens in
    /// the text are recognized, but not by byte and character tokenizers.
    ///
    /// # Errors
    /// A character without a token; errors of the tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::Characters(all) => {
                let token = |(place, character): (usize, char)| {
                    all.get(&character).copied().ok_or_else(|| Self::unknown(place, character))
                };
                text.char_indices().map(token).collect()
            }
            Kind::General => self.encoded(text, false),
        }
    }

    /// Returns the tokens of a text between others, as they are within the whole: those that end in `text`.
    pub(crate) fn encode_within(&self, before: &str, text: &str, after: &str) -> Result<Vec<u32>> {
        if before.is_empty() && after.is_empty() || !matches!(self.kind, Kind::General) {
            return self.encode(text);
        }
        let (begin, end) = (before.len(), before.len() + text.len());
        let tokens = self.encode_with_offsets(&[before, text, after].concat())?;
        let is_own = |place: &Range<usize>| (place.end > begin || begin == 0) && place.end <= end;
        let own = tokens.into_iter().filter(|(_, place)| is_own(place));
        Ok(own.map(|(token, _)| token).collect())
    }

    fn unknown(place: usize, character: char) -> Error {
        Error::Invalid {
            what: "the text",
            field: "a character",
            got: format!("{character:?} at byte {place}"),
            help: "the tokenizer has no token for it: it was made from another text",
        }
    }

    /// Returns the tokens of a text, with the special tokens that the folder's tokenizer adds at its beginning and end.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        match self.kind {
            Kind::General => self.encoded(text, true),
            _ => self.encode(text),
        }
    }

    fn encoded(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, special).map_err(|error| failed(&*error))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Returns the tokens of a text, each with the byte range of the text that it covers, in order and without gaps.
    /// Names of special tokens are recognized, also by the byte and character tokenizers.
    pub(crate) fn encode_with_offsets(&self, text: &str) -> Result<Vec<(u32, Range<usize>)>> {
        let encoding = self.inner.encode(text, false).map_err(|error| failed(&*error))?;
        let mut end = 0;
        let place = |(&token, &(first, last)): (&u32, &(usize, usize))| {
            if let (Kind::Characters(_), Some(character)) =
                (&self.kind, text.get(end..first).and_then(|gap| gap.chars().next()))
            {
                return Err(Self::unknown(end, character));
            }
            // White space that a tokenizer drops is assigned to the next token. Tokens that are parts of a character
            // all cover the character.
            let start = end.min(first);
            end = end.max(last);
            Ok((token, start..end))
        };
        let all: Result<Vec<_>> = encoding.get_ids().iter().zip(encoding.get_offsets()).map(place).collect();
        let all = all?;
        match (&self.kind, text.get(end..).and_then(|rest| rest.chars().next())) {
            (Kind::Characters(_), Some(character)) => Err(Self::unknown(end, character)),
            _ => Ok(all),
        }
    }

    /// Returns whether a text ends with the name of a special token.
    pub(crate) fn ends_with_special(&self, text: &str) -> bool {
        let added = self.inner.get_added_tokens_decoder();
        added
            .values()
            .any(|token| token.special && !token.content.is_empty() && text.ends_with(&token.content))
    }

    /// Returns the text of tokens, without special tokens. Bytes that are not valid UTF-8 are replaced.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|error| failed(&*error))
    }

    /// Returns a decoder for tokens that arrive one at a time.
    pub fn stream(&self) -> TextStream<'_> {
        TextStream::new(self)
    }

    /// Checks that all token ids are within a model's vocabulary.
    ///
    /// # Errors
    /// A tokenizer with more tokens than the model's vocabulary.
    pub fn check(&self, model: &ModelConfig) -> Result<()> {
        self.check_size(model.vocab_size)
    }

    /// As [`check`](Self::check), for a vocabulary size.
    pub(crate) fn check_size(&self, vocab_size: usize) -> Result<()> {
        if self.len() <= vocab_size {
            return Ok(());
        }
        let got = format!("{} tokens for a model of {vocab_size}", self.len());
        let help = "take the model's own tokenizer, or a model with a larger vocab_size";
        Err(Error::Invalid { what: "the tokenizer", field: "the vocabulary", got, help })
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json`, in the format of transformers.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let text = self.inner.to_string(true).map_err(|error| failed(&*error))?;
        let end = self.end.and_then(|end| self.inner.id_to_token(end));
        let config = serde_json::json!({ "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast" });
        for (name, text) in [(FILE, text), (CONFIG, format!("{config:#}\n"))] {
            let path = folder.join(name);
            training::internal::write_output(&path, text.as_bytes()).map_err(Error::io("write", &path))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({} tokens)", self.len())
    }
}

/// Returns the `tokenizer.json` of [`Tokenizer::bytes`].
pub(crate) fn byte_description() -> Value {
    description(&byte_alphabet(), true)
}

/// Returns the text of a special token, which the file has as a string or as an object with `content`.
pub(crate) fn text_of_token(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn failed(error: &(dyn std::error::Error + Send + Sync)) -> Error {
    Error::Format { path: FILE.into(), problem: one_line(error) }
}

fn one_line(error: &(dyn std::error::Error + Send + Sync)) -> String {
    error.to_string().lines().collect::<Vec<_>>().join(" ")
}
