//! Text of tokens that come one after the other.

use std::fmt;

use super::Tokenizer;
use crate::Result;

/// What stands for bytes that are no text, or not yet.
const REPLACED: char = char::REPLACEMENT_CHARACTER;

/// Text as tokens come: a character of several tokens is given with the last of them. All pieces and the [`rest`](Self::rest) are the
/// text of [`Tokenizer::decode`]; but where some bytes are no text, tokenizers with a token for each byte also replace those before
/// them, which may have been given already, and stay.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Those of the piece before the last, since some tokenizers write a token otherwise at the beginning, and all after them.
    tokens: Vec<u32>,
    /// How many of these belong to pieces that were given.
    known: usize,
    /// How much of the text of `tokens` was given.
    given: String,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, tokens: Vec::new(), known: 0, given: String::new() }
    }

    /// What there is to read with another token, if anything.
    ///
    /// # Errors
    /// What the tokenizer fails with.
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
        // What it ends with may be the beginning of a character.
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

    /// What no further token completes: a part of a character, as `decode` shows it. To be asked for once, at the end.
    ///
    /// # Errors
    /// What the tokenizer fails with.
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

    /// That of `tokens`, which begins with what was given.
    fn text(&mut self) -> Result<String> {
        let text = self.tokenizer.decode(&self.tokens)?;
        if text.starts_with(&*self.given) {
            return Ok(text);
        }
        // Where bytes are tokens of their own, one that fits nowhere makes some tokenizers replace those before it, too. What was given
        // stays; what comes after it is read by itself.
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
