//! Encoding of texts and conversations as tokens.

use minijinja::Value;
use rayon::prelude::*;

use crate::{LabelsConfig, Result, Tokenizer};

use super::chat::{Chat, ChatTemplate, Rendered};
use super::{Piece, TextSource, TokenWriter, label};

/// Approximate bytes of text in memory at a time, per thread.
const BATCH: usize = 1 << 20;

/// Encodes documents as tokens, in parallel on all processors.
///
/// - A text is enclosed in the special tokens that the folder's tokenizer adds, and followed by the end-of-text token
///   if there is one. All tokens count for the loss.
/// - Of a conversation, only the assistant's answers count, each with the token that ends it.
/// - A pair of answers is two documents, the chosen one first: in both the prompt with the answer, which counts.
/// - Of a prompt with its completion, the completion counts: from the first token on that the prompt alone does not have.
///   Strings are one text, as above; of lists of messages, the template writes the prompt as [`ChatTemplate::prompt`] does.
/// - A pair for a reward model ([`TextSource::open_rewarded`]) is two whole documents: strings as texts above, lists of messages as
///   the template writes them.
/// - A document with a label has the tokens that transformers' tokenizers give for it: no end-of-text token is added.
#[derive(Debug)]
pub struct TextEncoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    labels: Option<&'a LabelsConfig>,
    before: Vec<u32>,
    after: Vec<u32>,
}

/// Tokens of a piece, and which of them count; `None` if all do.
struct Encoded {
    tokens: Vec<u32>,
    counted: Option<Vec<bool>>,
    ends: bool,
    /// What its label is; empty if it has none.
    labels: Vec<f32>,
}

impl<'a> TextEncoder<'a> {
    /// Creates an encoder; conversations need a template.
    ///
    /// # Errors
    /// Errors of the tokenizer.
    pub fn new(tokenizer: &'a Tokenizer, template: Option<ChatTemplate>) -> Result<Self> {
        // Encodes a sample with and without special tokens, to find those that the tokenizer adds. Any text that has
        // tokens will do.
        let sample = |token: u32| tokenizer.decode(&[token]).ok().filter(|text| !text.trim().is_empty());
        let sample = (0..tokenizer.len() as u32).find_map(sample).unwrap_or_default();
        let (whole, plain) = (tokenizer.encode_whole(&sample)?, tokenizer.encode(&sample)?);
        let place =
            (0..=whole.len().saturating_sub(plain.len())).find(|place| whole[*place..].starts_with(&plain));
        let place = place.unwrap_or_default();
        let before = whole[..place].to_vec();
        let mut after = whole.get(place + plain.len()..).unwrap_or_default().to_vec();
        if let Some(end) = tokenizer.end_of_text().filter(|end| after.last() != Some(end)) {
            after.push(end);
        }
        Ok(Self { tokenizer, template, labels: None, before, after })
    }

    /// Encodes documents with labels, of a source that is read [for them](TextSource::open_labelled).
    #[must_use]
    pub fn with_labels(self, labels: &'a LabelsConfig) -> Self {
        Self { labels: Some(labels), ..self }
    }

    fn template(&self) -> Result<&ChatTemplate> {
        self.template.as_ref().ok_or_else(|| crate::Error::Invalid {
            what: "a conversation",
            field: "the chat template",
            got: "missing".into(),
            help: "the model's folder needs chat_template.jinja, or `chat_template` in tokenizer_config.json; or give --chat-template",
        })
    }

    /// Returns the tokens of a conversation, and which of them count for the loss; several rows of them where
    /// [`ChatTemplate::render`] gives several texts.
    ///
    /// # Errors
    /// No template; errors of the template; characters without a token.
    pub fn chat(&self, chat: &Chat) -> Result<Vec<(Vec<u32>, Vec<bool>)>> {
        let template = self.template()?;
        if let Some((prompt, text)) = template.completion(chat)? {
            return Ok(vec![completing(&self.of_rendered(&prompt)?, self.of_rendered(&text)?)]);
        }
        let marked = template.marks_answers_of(chat);
        template.render(chat)?.into_iter().map(|row| self.rendered(row, marked)).collect()
    }

    /// Returns the tokens of a text that a template has written, special ones included.
    fn of_rendered(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_with_offsets(text)?.into_iter().map(|(token, _)| token).collect())
    }

    /// Returns the tokens of a document with a label.
    fn labelled(&self, document: &Piece) -> Result<Vec<u32>> {
        match document {
            Piece::Text { text, .. } => self.tokenizer.encode_whole(text),
            Piece::Completion { prompt, completion } => {
                self.tokenizer.encode_whole(&[&prompt[..], completion].concat())
            }
            Piece::Chat(chat) => self.of_rendered(&self.template()?.whole(chat)?),
            Piece::Labelled { document, .. } => self.labelled(document),
            Piece::Pair { .. } | Piece::ChatPair(_) => {
                Err(refuse_pair("its label", "given", "it has two documents: read them one by one"))
            }
        }
    }

    /// Returns the tokens of the two documents of a pair for a reward model; `None` of what is no pair.
    fn rewarded(&self, document: &Piece) -> Result<Option<[Vec<u32>; 2]>> {
        let [chosen, rejected] = match document {
            Piece::Pair { prompt, answers } => {
                answers.each_ref().map(|answer| self.whole(&[&prompt[..], answer].concat()))
            }
            Piece::ChatPair(chats) => {
                let template = self.template()?;
                chats.each_ref().map(|chat| self.of_rendered(&template.whole(chat)?))
            }
            _ => return Ok(None),
        };
        Ok(Some([chosen?, rejected?]))
    }

    fn rendered(
        &self,
        Rendered { text, mut answers }: Rendered,
        marked: bool,
    ) -> Result<(Vec<u32>, Vec<bool>)> {
        if !marked {
            for answer in &mut answers {
                answer.end = answer.start + self.without_space(&text[answer.clone()]);
            }
        }
        let tokens = self.tokenizer.encode_with_offsets(&text)?;
        // Tokens and answers are both in order.
        let mut first = 0;
        let counts = tokens.iter().map(|(_, place)| {
            while answers.get(first).is_some_and(|answer| answer.end <= place.start) {
                first += 1;
            }
            answers.get(first).is_some_and(|answer| answer.start < place.end)
        });
        let counts: Vec<bool> = counts.collect();
        Ok((tokens.into_iter().map(|(token, _)| token).collect(), counts))
    }

    /// Returns the length of an answer, without the white space after a special token at its end: that belongs to what
    /// follows.
    fn without_space(&self, answer: &str) -> usize {
        let trimmed = answer.trim_end();
        match self.tokenizer.ends_with_special(trimmed) {
            true => trimmed.len(),
            false => answer.len(),
        }
    }

    /// Encodes and writes all documents of a source. `progress` is called with the number of its bytes that are done.
    ///
    /// # Errors
    /// A source without text; errors of the source, the tokenizer, the template or the writer.
    pub fn write(
        &self,
        source: &mut TextSource,
        writer: &mut TokenWriter,
        mut progress: impl FnMut(u64),
    ) -> Result<()> {
        let before = writer.tokens();
        loop {
            let (mut pieces, mut bytes) = (Vec::new(), 0);
            while bytes < BATCH * rayon::current_num_threads() {
                let Some(piece) = source.next_piece()? else { break };
                bytes += piece.bytes();
                pieces.push((piece, source.place()));
            }
            if pieces.is_empty() {
                break;
            }
            let encoded: Vec<Vec<Encoded>> = pieces
                .par_iter()
                .map(|(piece, place)| self.piece(piece).map_err(|error| place.refuse(error)))
                .collect::<Result<_>>()?;
            for Encoded { tokens, counted, ends, labels } in encoded.into_iter().flatten() {
                match counted {
                    Some(counted) => writer.push_counted(&tokens, |place| counted[place])?,
                    None => writer.push(&tokens)?,
                }
                if !labels.is_empty() {
                    writer.label_document(&labels)?;
                }
                if ends {
                    writer.end_document()?;
                }
            }
            progress(source.bytes_read());
        }
        match writer.tokens() == before {
            true => Err(source.refuse("it has no text")),
            false => Ok(()),
        }
    }

    /// Returns the tokens of the beginning of a text.
    fn begun(&self, text: &str) -> Result<Vec<u32>> {
        Ok([&self.before[..], &self.tokenizer.encode(text)?].concat())
    }

    /// Returns the tokens of a whole text, which may end with the end-of-text token already.
    fn whole(&self, text: &str) -> Result<Vec<u32>> {
        let mut all = self.begun(text)?;
        let after = if all.ends_with(&self.after) { &[][..] } else { &self.after };
        all.extend(after);
        Ok(all)
    }

    /// Returns the tokens of a conversation's prompt, and of all of it.
    fn completed(&self, chat: &Chat) -> Result<(Vec<u32>, Vec<u32>)> {
        let texts = self.template()?.completion(chat)?;
        let (prompt, text) = texts.ok_or_else(|| refuse_pair("the prompt", "missing", "give one"))?;
        Ok((self.of_rendered(&prompt)?, self.of_rendered(&text)?))
    }

    fn piece(&self, piece: &Piece) -> Result<Vec<Encoded>> {
        match piece {
            Piece::Text { text, context: (before, after), begins, ends } => {
                let mut tokens = if *begins { self.before.clone() } else { Vec::new() };
                tokens.extend(self.tokenizer.encode_within(before, text, after)?);
                if *ends {
                    tokens.extend(&self.after);
                }
                Ok(vec![Encoded { tokens, counted: None, ends: *ends, labels: Vec::new() }])
            }
            Piece::Completion { prompt, completion } => {
                let (tokens, counted) =
                    completing(&self.begun(prompt)?, self.whole(&[&prompt[..], completion].concat())?);
                Ok(vec![Encoded { tokens, counted: Some(counted), ends: true, labels: Vec::new() }])
            }
            Piece::Pair { prompt, answers: [chosen, rejected] } => {
                let whole = |answer: &String| self.whole(&[&prompt[..], answer].concat());
                pair(&self.begun(prompt)?, [whole(chosen)?, whole(rejected)?])
            }
            Piece::ChatPair([chosen, rejected]) => {
                let (prompt, chosen) = self.completed(chosen)?;
                pair(&prompt, [chosen, self.completed(rejected)?.1])
            }
            Piece::Chat(chat) => {
                let rows = self.chat(chat)?.into_iter();
                let encoded = |(tokens, counted)| Encoded {
                    tokens,
                    counted: Some(counted),
                    ends: true,
                    labels: Vec::new(),
                };
                Ok(rows.map(encoded).collect())
            }
            Piece::Labelled { document, label } => {
                let refuse = |got: String, help| {
                    let (what, field) = ("a document with a label", "the tokens");
                    Err(crate::Error::Invalid { what, field, got, help })
                };
                let Some(known) = self.labels else {
                    return refuse("a label".into(), "only a model with a head for labels reads them");
                };
                if let Some(tokens) = self.rewarded(document)? {
                    return rewarded(tokens, label);
                }
                let tokens = self.labelled(document)?;
                if tokens.is_empty() {
                    return refuse("none".into(), "give a text that has some, or leave the document out");
                }
                let labels = label::parse(label, known).map_err(crate::Error::Label)?;
                Ok(vec![Encoded { tokens, counted: None, ends: true, labels }])
            }
        }
    }
}

/// Returns a pair as two documents. In both the answer begins where one of them differs from the prompt's tokens, as TRL does it.
fn pair(prompt: &[u32], answers: [Vec<u32>; 2]) -> Result<Vec<Encoded>> {
    let common = |tokens: &Vec<u32>| prompt.iter().zip(tokens).take_while(|(a, b)| a == b).count();
    let shared = answers.iter().map(common).min().unwrap_or_default();
    check_unequal(&answers)?;
    // The first token of all has nothing to be predicted from.
    if answers.iter().any(|tokens| tokens.len() <= shared.max(1)) {
        return Err(refuse_pair("an answer", "without a token to learn", "give it some text"));
    }
    let document = |tokens: Vec<u32>| {
        let counted = (0..tokens.len()).map(|place| place >= shared).collect();
        Encoded { tokens, counted: Some(counted), ends: true, labels: Vec::new() }
    };
    Ok(answers.map(document).into())
}

/// Returns a pair for a reward model as two documents, each with the margin as label.
fn rewarded(documents: [Vec<u32>; 2], margin: &Value) -> Result<Vec<Encoded>> {
    check_unequal(&documents)?;
    if documents.iter().any(Vec::is_empty) {
        return Err(refuse_pair("a document", "without a token", "give it some text"));
    }
    let labels = vec![label::number(margin).map_err(crate::Error::Label)?];
    let document = |tokens| Encoded { tokens, counted: None, ends: true, labels: labels.clone() };
    Ok(documents.map(document).into())
}

fn check_unequal(answers: &[Vec<u32>; 2]) -> Result<()> {
    if answers[0] != answers[1] {
        return Ok(());
    }
    Err(refuse_pair(
        "the rejected answer",
        "of the same tokens as the chosen one",
        "nothing is preferred: leave the pair out",
    ))
}

fn refuse_pair(field: &'static str, got: &str, help: &'static str) -> crate::Error {
    crate::Error::Invalid { what: "a pair", field, got: got.into(), help }
}

/// Returns the tokens of a prompt with its completion, and which of them count: those from where they differ from the prompt's on, as
/// TRL does it.
fn completing(prompt: &[u32], tokens: Vec<u32>) -> (Vec<u32>, Vec<bool>) {
    let shared = prompt.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
    let counted = (0..tokens.len()).map(|place| place >= shared).collect();
    (tokens, counted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Byte-level, where two line ends are one token unless a word follows; and one that prepends a space to a text.
    const TOKENIZERS: [(&str, &str, &str); 2] = [
        (
            r#"null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}"#,
            r#"{"Ċ": 0, "ĊĊ": 1, "T": 2, "o": 3, "Ġ": 4, "be": 5, "b": 6, "e": 7}"#,
            r#"["Ċ Ċ", "b e"]"#,
        ),
        (
            r#"{"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]}, "pre_tokenizer": null"#,
            r#"{"\n": 0, "▁": 1, "T": 2, "o": 3, "▁T": 4, "b": 5, "e": 6}"#,
            r#"["▁ T"]"#,
        ),
    ];

    #[test]
    fn a_long_text_has_the_tokens_of_the_whole() {
        for (normalizer, vocabulary, merges) in TOKENIZERS {
            let folder = tempfile::tempdir().unwrap();
            let json = format!(
                r#"{{"version": "1.0", "added_tokens": [], "normalizer": {normalizer},
                    "model": {{"type": "BPE", "vocab": {vocabulary}, "merges": {merges}}}}}"#
            );
            std::fs::write(folder.path().join("tokenizer.json"), json).unwrap();
            let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
            let text = "To be To be\n\n".repeat(60_000) + "To\n\n";
            let path = folder.path().join("text");
            std::fs::write(&path, &text).unwrap();
            let (encoder, mut source) =
                (TextEncoder::new(&tokenizer, None).unwrap(), TextSource::open(&path, None).unwrap());
            let (mut tokens, mut pieces) = (Vec::new(), 0);
            while let Some(piece) = source.next_piece().unwrap() {
                tokens.extend(encoder.piece(&piece).unwrap().remove(0).tokens);
                pieces += 1;
            }
            assert!(pieces > 2 && tokens == tokenizer.encode(&text).unwrap());
        }
    }
}
