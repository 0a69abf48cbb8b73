//! Incremental decoding: text of tokens that arrive one at a time.

use std::fmt;

use super::Tokenizer;
use crate::Result;

/// Stands for bytes that are not valid UTF-8, or are an incomplete character.
const REPLACED: char = char::REPLACEMENT_CHARACTER;

/// Incremental decoder: a character of several tokens is returned with the last of them. All pieces and the
/// [`rest`](Self::rest) together are the text of [`Tokenizer::decode`]. Exception: where bytes are not valid UTF-8, the
/// `decode` of tokenizers with byte tokens may also replace bytes before them; pieces that were already returned are
/// not changed.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens of the last complete piece, since some tokenizers decode a token differently at the beginning of a text,
    /// and all later tokens.
    tokens: Vec<u32>,
    /// How many of `tokens` belong to the last complete piece.
    known: usize,
    /// The part of the text of `tokens` that was already returned.
    given: String,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), known: 0, given: String::new() }
    }

    /// Adds a token; returns the text that it completes, if any.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    ///
    /// ```
    /// let tokenizer = models::Tokenizer::bytes()?;
    /// let mut stream = tokenizer.stream();
    /// assert_eq!(stream.push(0xc3)?, None);
    /// assert_eq!(stream.push(0xa9)?, Some("é".to_string()));
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn push(&mut self, token: u32) -> Result<Option<String>> {
        self.tokens.push(token);
        let text = self.text()?;
        // Trailing replacement characters may be the beginning of a character.
        let whole = text.trim_end_matches(REPLACED);
        let Some(piece) = whole.strip_prefix(&*self.given).filter(|piece| !piece.is_empty()) else {
            return Ok(None);
        };
        let piece = piece.to_string();
        if whole.len() == text.len() {
            self.tokens.drain(..self.known);
            self.known = self.tokens.len();
            self.given = self.tokenizer.decode(&self.tokens)?;
        } else {
            self.given = whole.to_string();
        }
        Ok(Some(piece))
    }

    /// Returns the text that no further token completes: a partial character, as `decode` shows it. To be called once,
    /// at the end.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    ///
    /// ```
    /// let tokenizer = models::Tokenizer::bytes()?;
    /// let mut stream = tokenizer.stream();
    /// assert_eq!(stream.push(0xc3)?, None);
    /// assert_eq!(stream.rest()?, "\u{fffd}");
    /// # Ok::<(), models::Error>(())
    /// ```
    pub fn rest(&mut self) -> Result<String> {
        let text = self.text()?;
        Ok(text.strip_prefix(&*self.given).unwrap_or_default().to_string())
    }

    /// Decodes `tokens`, to a text that begins with `given`.
    fn text(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.tokens)?;
        if text.starts_with(&*self.given) {
            return Ok(text);
        }
        // An invalid byte token makes some tokenizers also replace bytes before it. What was returned stays; the tokens
        // after it are decoded by themselves.
        self.tokens.drain(..self.known);
        (self.known, self.given) = (0, String::new());
        self.tokenizer.decode(&self.tokens)
    }
}

impl fmt::Debug for TextStream<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TextStream({} tokens)", self.tokens.len())
    }
}
