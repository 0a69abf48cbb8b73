//! Finds the assistant's answers in the text of a conversation.

use std::ops::Range;

use minijinja::context;

use crate::Result;

use super::{BEGIN, Chat, ChatTemplate, END, Rendered, is_answer};

impl ChatTemplate {
    /// Returns the text and the byte ranges of answers, by the template's `generation` marks.
    pub(super) fn answers_by_marks(&self, chat: &Chat) -> Result<Rendered> {
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
        self.keep_trained(chat, &mut answers)?;
        Ok(Rendered { text, answers })
    }

    /// Removes the marked answers that are not trained on.
    fn keep_trained(&self, chat: &Chat, answers: &mut Vec<Range<usize>>) -> Result<()> {
        let are_trained: Vec<bool> = (0..chat.messages.len())
            .filter(|place| is_answer(&chat.messages[*place]))
            .map(|place| chat.trained[place])
            .collect();
        if !are_trained.contains(&false) {
            return Ok(());
        }
        if are_trained.len() != answers.len() {
            let (marked, all) = (answers.len(), are_trained.len());
            return Err(self.problem(format!(
                "the chat template marks {marked} answers, and the conversation has {all}: it cannot be told which one a `weight` or \
                 `train` of a message is for"
            )));
        }
        let mut are_trained = are_trained.into_iter();
        answers.retain(|_| are_trained.next().unwrap_or(true));
        Ok(())
    }

    /// Returns the texts and the byte ranges of answers. Each answer is looked for in the text of the messages up to it, as its user
    /// saw it, by comparing that with the text before it. Texts that go on as they began are one.
    ///
    /// # Cost
    /// Two renderings for each answer, of all messages up to it.
    pub(super) fn answers_by_prefix(&self, chat: &Chat) -> Result<Vec<Rendered>> {
        let mut rows: Vec<Rendered> = Vec::new();
        for place in (0..chat.messages.len()).filter(|place| chat.trained[*place]) {
            let text = self.text(&chat.messages[..=place], chat, false)?;
            let Some(begin) = self.begin(place, chat, &text)?.filter(|begin| *begin < text.len()) else {
                return Err(self.problem(format!(
                    "the chat template writes what comes before message {place} otherwise where that message follows, so that the answer \
                     cannot be told from the rest; mark answers in the template with {{% generation %}} and {{% endgeneration %}}"
                )));
            };
            let answer = begin..text.len();
            match rows.last_mut().filter(|row| text.starts_with(&row.text)) {
                Some(row) => {
                    row.answers.push(answer);
                    row.text = text;
                }
                None => rows.push(Rendered { text, answers: vec![answer] }),
            }
        }
        // Messages after the last answer.
        let whole = self.text(&chat.messages, chat, false);
        if let (Some(row), Ok(whole)) = (rows.last_mut(), whole)
            && whole.starts_with(&row.text)
        {
            row.text = whole;
        }
        Ok(rows)
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
        let follows_answer = before.last().is_some_and(is_answer);
        let prompt = match self.text(before, chat, true) {
            // After another answer, a template may fail without a message of the user.
            Err(_) if follows_answer => None,
            prompt => Some(prompt?),
        };
        if let Some(begin) = prompt.as_ref().and_then(|prompt| prefix(prompt, whole)) {
            return Ok(Some(begin));
        }
        let Some(before) = prefix(&self.text(before, chat, false)?, whole) else { return Ok(None) };
        let shared = prompt.map(|prompt| common(&prompt, whole).min(self.content(place, chat, whole)));
        Ok(Some(shared.map_or(before, |shared| shared.max(before))))
    }

    /// Returns where the text differs if a mark is in the place of an answer's content; its end if it does not.
    fn content(&self, place: usize, chat: &Chat, whole: &str) -> usize {
        let mut messages = chat.messages[..=place].to_vec();
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
    use super::super::Texts;
    use super::*;

    /// As DeepSeek-R1's: fails without messages, ends its prompt with `<think>`, and drops the reasoning of answers.
    const TEMPLATE: &str = "{% if messages[0].role != 'system' %}system: be kind\n{% endif %}{% for m in messages %}\
        {{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}";

    fn answers(messages: &str) -> Vec<String> {
        let template = ChatTemplate::new(
            Texts { text: TEMPLATE.into(), with_tools: None, path: "template".into() },
            Default::default(),
        )
        .unwrap();
        let rows = template.render(&Chat::from_json(messages).unwrap()).unwrap();
        let texts =
            rows.iter().flat_map(|row| row.answers.iter().map(|answer| row.text[answer.clone()].to_string()));
        texts.collect()
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
