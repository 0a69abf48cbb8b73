//! Finds the assistant's answers in the text of a conversation.

use std::ops::Range;

use minijinja::context;

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

    /// Returns where an answer begins: after the text of the messages before it, and after the generation prompt, or as
    /// much of it as the text has before the answer's content.
    fn begin(&self, place: usize, chat: &Chat, whole: &str) -> Result<Option<usize>> {
        let before = &chat.messages[..place];
        if before.is_empty() {
            // Without messages, some templates fail or write something else.
            let prompt = self.text(before, chat, true).ok().and_then(|prompt| prefix(&prompt, whole));
            return Ok(Some(
                prompt.filter(|len| *len > 0).unwrap_or_else(|| self.content(place, chat, whole)),
            ));
        }
        let prompt = self.text(before, chat, true)?;
        let begin = prefix(&prompt, whole)
            .unwrap_or_else(|| common(&prompt, whole).min(self.content(place, chat, whole)));
        Ok(prefix(&self.text(before, chat, false)?, whole).map(|before| before.max(begin)))
    }

    /// Returns where the text differs if a mark is in the place of an answer's content; its end if it does not.
    fn content(&self, place: usize, chat: &Chat, whole: &str) -> usize {
        let mut messages = chat.messages.clone();
        messages[place] = context! { role => "assistant", content => BEGIN.to_string() };
        self.text(&messages, chat, false).map_or(whole.len(), |marked| common(&marked, whole))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// As DeepSeek-R1's: fails without messages, ends its prompt with `<think>`, and drops the reasoning of answers.
    const TEMPLATE: &str = "{% if messages[0].role != 'system' %}system: be kind\n{% endif %}{% for m in messages %}\
        {{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}";

    fn answers(messages: &str) -> Vec<String> {
        let template = ChatTemplate::new(TEMPLATE, None, Default::default(), "template".into()).unwrap();
        let (text, answers) = template.render(&Chat::from_json(messages).unwrap()).unwrap();
        answers.into_iter().map(|answer| text[answer].to_string()).collect()
    }

    #[test]
    fn what_precedes_a_first_answer_is_no_answer() {
        for content in ["Hello!", "<b>Hello!", "a</think>Hello!"] {
            let messages = format!(
                r#"[{{"role": "assistant", "content": "{content}"}}, {{"role": "user", "content": "x"}}]"#
            );
            assert_eq!(answers(&messages), [format!("{}\n", content.trim_start_matches("a</think>"))]);
        }
    }

    #[test]
    fn an_answer_that_begins_as_the_prompt_ends_is_whole() {
        for content in ["<b>x</b>", "a</think><b>x</b>"] {
            let messages = format!(
                r#"[{{"role": "user", "content": "x"}}, {{"role": "assistant", "content": "{content}"}}]"#
            );
            assert_eq!(answers(&messages), ["<b>x</b>\n"]);
        }
        // What the prompt has, the model does not write.
        let messages =
            r#"[{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>\na"}]"#;
        assert_eq!(answers(messages), ["a\n"]);
    }
}
