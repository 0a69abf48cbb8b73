//! Pieces of a text source.

use minijinja::Value;

use super::chat::Chat;

/// Piece of a [`TextSource`](super::TextSource).
#[derive(Debug)]
#[non_exhaustive]
pub enum Piece {
    /// Part of a document's text, or all of it.
    Text {
        /// Never empty.
        text: String,
        /// What comes directly before and after it in the document, some of it: a tokenizer needs it to split the text as it
        /// would within the whole document. Empty where the text is the whole document, or cut within a line.
        context: (String, String),
        /// Whether it begins the document.
        begins: bool,
        /// Whether it ends the document.
        ends: bool,
    },
    /// A whole conversation.
    Chat(Chat),
    /// A prompt, which does not count for the loss, and what follows it, which does.
    Completion {
        /// May be empty.
        prompt: String,
        /// Never empty.
        completion: String,
    },
    /// A whole text or conversation with its label, of a source that is read [for labels](super::TextSource::open_labelled); or two of
    /// them, a pair, with its margin, of one that is read [for a reward model](super::TextSource::open_rewarded).
    Labelled {
        /// What has the label.
        document: Box<Piece>,
        /// The label, as the record has it.
        label: Value,
    },
    /// A prompt and two answers, of which the first is preferred.
    Pair {
        /// May be empty.
        prompt: String,
        /// The chosen and the rejected one.
        answers: [String; 2],
    },
    /// The same as conversations with one prompt.
    ChatPair([Chat; 2]),
}

impl Piece {
    /// Returns the approximate bytes of its text.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Text { text, .. } => text.len(),
            Self::Chat(chat) => chat.bytes(),
            Self::Completion { prompt, completion } => prompt.len() + completion.len(),
            Self::Labelled { document, .. } => document.bytes(),
            Self::Pair { prompt, answers } => answers.iter().map(|answer| prompt.len() + answer.len()).sum(),
            Self::ChatPair(chats) => chats.iter().map(Chat::bytes).sum(),
        }
    }
}
