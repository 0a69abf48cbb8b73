//! Finds the assistant's answers in the text of a conversation.

use std::ops::Range;

use crate::Result;

use super::{BEGIN, Chat, ChatTemplate, END, is_answer};

impl ChatTemplate {
    /// Returns the text and the byte ranges of answers, by the template's `generation` marks.
    pub(super) fn answers_by_marks(&self, chat: &Chat) -> Result<(String, Vec<Range<usize>>)> {
        let with_marks = self.text(&chat.messages, chat, false)?;
        let (mut text, mut answers, mut begin) = (String::with_capacity(with_marks.len()), Vec::new(), None);
        for character in with_marks.chars() {
            match (character, begin) {
                (BEGIN, None) => begin = Some(text.len()),
                (END, Some(from)) => {
                    answers.push(from..text.len());
                    begin = None;
                }
                (BEGIN | END, _) => {
                    let problem =
                        "the chat template or a message has characters that mark answers: U+FDD0, U+FDD1";
                    return Err(self.problem(problem.into()));
                }
                (other, _) => text.push(other),
            }
        }
        Ok((text, answers))
    }

    /// Returns the text and the byte ranges of answers, by comparing the text up to each answer with the text before
    /// it.
    pub(super) fn answers_by_prefix(&self, chat: &Chat) -> Result<(String, Vec<Range<usize>>)> {
        let (messages, whole) = (&chat.messages, self.text(&chat.messages, chat, false)?);
        let mut answers: Vec<Range<usize>> = Vec::new();
        for place in (0..messages.len()).filter(|place| is_answer(&messages[*place])) {
            let follows_answer = place > 0 && is_answer(&messages[place - 1]);
            // After another answer, a template may fail without a message of the user.
            let begin = match answers.last().filter(|_| follows_answer) {
                Some(before) => {
                    let begin = self.begin(place, chat, &whole).ok().flatten();
                    Some(begin.map_or(before.end, |begin| begin.max(before.end)))
                }
                None => self.begin(place, chat, &whole)?,
            };
            let end = match place + 1 == messages.len() {
                true => Some(whole.len()),
                false => prefix(&self.text(&messages[..=place], chat, false)?, &whole),
            };
            match (begin, end) {
                (Some(begin), Some(end)) if begin < end => answers.push(begin..end),
                _ => {
                    return Err(self.problem(format!(
                        "the chat template writes what comes before the end of message {place} otherwise where other messages \
                         follow, so that the answer cannot be told from the rest; mark answers in the template with \
                         {{% generation %}} and {{% endgeneration %}}"
                    )));
                }
            }
        }
        Ok((whole, answers))
    }

    /// Returns where an answer begins: after the text of the messages before it, and after as much of the generation
    /// prompt as the text has.
    fn begin(&self, place: usize, chat: &Chat, whole: &str) -> Result<Option<usize>> {
        let before = &chat.messages[..place];
        if before.is_empty() {
            // Some templates fail without messages.
            let prompt = self.text(before, chat, true).unwrap_or_default();
            return Ok(Some(common(&prompt, whole)));
        }
        let prompt = self.text(before, chat, true)?;
        Ok(prefix(&self.text(before, chat, false)?, whole).map(|before| before.max(common(&prompt, whole))))
    }
}

/// Returns the length of `text` if `whole` begins with it.
fn prefix(text: &str, whole: &str) -> Option<usize> {
    whole.starts_with(text).then_some(text.len())
}

/// Returns the length in bytes of the common beginning of two texts.
fn common(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(character, _)| character.len_utf8()).sum()
}
