//! The tokenizer of a GGUF file's metadata, as `tokenizer.json` and `tokenizer_config.json` would have it.

use std::collections::HashMap;

use serde_json::{Map, Value as Json, json};

use crate::Result;
use crate::gguf_file::{BYTE, CONTROL, Content, EXPRESSIONS, UNKNOWN, UNUSED, USER_DEFINED};
use crate::tokenizer::{byte_alphabet, byte_description};

/// What a space is, where characters stand for themselves.
const SPACE: &str = "\u{2581}";

fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// Tokens in the order of their numbers.
struct Tokens<'a> {
    texts: &'a [String],
    kinds: Vec<i32>,
}

impl<'a> Tokens<'a> {
    fn of(content: &'a Content) -> Result<Self> {
        let missing = || content.refuse(format!("it has no {}", key("tokens")));
        let texts = content.texts(&key("tokens"))?.ok_or_else(missing)?;
        let kinds =
            content.whole_numbers(&key("token_type"))?.map_or_else(|| vec![1; texts.len()], <[i32]>::to_vec);
        match kinds.len() == texts.len() {
            true => Ok(Self { texts, kinds }),
            false => Err(content.refuse(format!(
                "it has {} tokens, and {} kinds of tokens",
                texts.len(),
                kinds.len()
            ))),
        }
    }

    fn iter(&self) -> impl Iterator<Item = (usize, &'a str, i32)> {
        let kinds = self.kinds.iter().copied();
        self.texts.iter().zip(kinds).enumerate().map(|(id, (text, kind))| (id, &**text, kind))
    }

    /// Returns the numbers of all tokens that are used.
    fn vocab(&self) -> Map<String, Json> {
        let used = self.iter().filter(|(.., kind)| *kind != UNUSED);
        used.map(|(id, text, _)| (text.to_string(), id.into())).collect()
    }

    /// Returns the tokens that are found in a text before it is divided.
    fn added(&self) -> Vec<Json> {
        let all = self.iter().filter(|(.., kind)| [CONTROL, USER_DEFINED, UNKNOWN].contains(kind));
        let added = all.map(|(id, text, kind)| {
            json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": kind != USER_DEFINED
            })
        });
        added.collect()
    }

    /// Whether each byte is a token, and nothing else but the end of a text.
    fn are_bytes(&self) -> bool {
        let alphabet = byte_alphabet();
        let is_byte = |(id, text, _): (usize, &str, i32)| {
            let mut characters = text.chars();
            characters.next() == alphabet.get(id).copied() && characters.next().is_none()
        };
        let more: Vec<_> = self.iter().skip(alphabet.len()).filter(|(.., kind)| *kind != UNUSED).collect();
        self.iter().take(alphabet.len()).all(is_byte)
            && self.texts.len() > alphabet.len()
            && matches!(more[..], [(256, crate::tokenizer::END, CONTROL)])
    }
}

/// Returns what `tokenizer.json` would have; `None` if the file has no tokenizer.
pub(super) fn tokenizer(content: &Content) -> Result<Option<Vec<u8>>> {
    if let Some(text) = content.text("tokenizer.huggingface.json")? {
        return Ok(Some(text.into()));
    }
    let Some(model) = content.text(&key("model"))?.filter(|model| !["none", "no_vocab"].contains(model))
    else {
        return Ok(None);
    };
    let tokens = Tokens::of(content)?;
    let mut json = match model {
        "gpt2" => of_bytes(content, &tokens)?,
        "llama" => of_characters(content, &tokens)?,
        other => {
            return Err(content.refuse(format!(
                "its tokenizer is of the kind {other:?}; supported are gpt2 and llama: give the model's folder"
            )));
        }
    };
    if let Some(added) = template(content, &tokens)? {
        json["post_processor"] = added;
    }
    Ok(Some(json.to_string().into()))
}

/// Pairs that are merged, of characters that stand for bytes.
fn of_bytes(content: &Content, tokens: &Tokens<'_>) -> Result<Json> {
    let merges = content.texts(&key("merges"))?.unwrap_or_default();
    let name = content.text(&key("pre"))?.unwrap_or("default");
    if merges.is_empty() && tokens.are_bytes() {
        return Ok(byte_description());
    }
    let bytes = |divides: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": divides });
    let known = match name {
        "llama3" | "llama-v3" | "smaug-bpe" => "llama-bpe",
        "deepseek-r1-qwen" => "qwen2",
        "mistral-bpe" => "tekken",
        other => other,
    };
    let before = match (known, EXPRESSIONS.iter().find(|(name, _)| *name == known)) {
        (_, Some((_, expression))) => vec![
            json!({ "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false }),
            bytes(false),
        ],
        ("gpt-2", _) => vec![bytes(true)],
        ("smollm", _) => vec![json!({ "type": "Digits", "individual_digits": true }), bytes(true)],
        _ => {
            let known = EXPRESSIONS.map(|(name, _)| name).join(", ");
            return Err(content.refuse(format!(
                "{} is {name:?}: how it divides text is not known here; supported are gpt-2, smollm, {known}: give the model's folder",
                key("pre")
            )));
        }
    };
    // The other name of the same expression, DeepSeek's, stands for none.
    let normalizer = if name == "qwen2" { json!({ "type": "NFC" }) } else { Json::Null };
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": normalizer,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": before },
        "post_processor": null,
        "decoder": bytes(true),
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": known == "llama-bpe" || known == "tekken",
            "vocab": tokens.vocab(), "merges": merges
        }
    }))
}

/// Pairs that are merged, of characters that stand for themselves.
fn of_characters(content: &Content, tokens: &Tokens<'_>) -> Result<Json> {
    let scores = content.numbers(&key("scores"))?.unwrap_or_default();
    if scores.len() != tokens.texts.len() {
        return Err(content.refuse(format!(
            "it has {} tokens, and {} scores",
            tokens.texts.len(),
            scores.len()
        )));
    }
    let begins = content.flag(&key("add_space_prefix"))?.unwrap_or(true);
    let begin = begins.then(|| json!({ "type": "Prepend", "prepend": SPACE }));
    let spaces = json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE });
    let normalizers: Vec<Json> = begin.into_iter().chain([spaces]).collect();
    let back = json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " });
    let strip = begins.then(|| json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    let decoders: Vec<Json> = [back, json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })]
        .into_iter()
        .chain(strip)
        .collect();
    let unknown = tokens.iter().find(|(.., kind)| *kind == UNKNOWN).map(|(_, text, _)| text);
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": tokens.added(),
        "normalizer": { "type": "Sequence", "normalizers": normalizers },
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": decoders },
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": tokens.vocab(), "merges": merges(tokens, scores)
        }
    }))
}

/// Returns the pairs whose sum is a token, in the order in which they are merged: of the higher score, and of two pairs of one token
/// that of the longer first part.
fn merges<'a>(tokens: &Tokens<'a>, scores: &[f32]) -> Vec<[&'a str; 2]> {
    let is_part = |kind: i32| ![CONTROL, UNKNOWN, UNUSED, BYTE, USER_DEFINED].contains(&kind);
    let parts = || tokens.iter().filter(|(.., kind)| is_part(*kind));
    let known: HashMap<&str, usize> = parts().map(|(id, text, _)| (text, id)).collect();
    let mut all = Vec::new();
    for (id, text, _) in parts() {
        let mut own = Vec::new();
        for (at, _) in text.char_indices().skip(1) {
            let (first, second) = text.split_at(at);
            if let (Some(a), Some(b)) = (known.get(first), known.get(second)) {
                own.push(((*a, *b), [first, second]));
            }
        }
        own.sort_unstable();
        all.extend(own.into_iter().map(|(_, pair)| (scores[id], pair)));
    }
    let characters = |text: &str| text.chars().count();
    all.sort_by(|(a, [a1, a2]), (b, [b1, b2])| {
        b.total_cmp(a)
            .then_with(|| characters(b1).cmp(&characters(a1)))
            .then_with(|| characters(b2).cmp(&characters(a2)))
    });
    all.into_iter().map(|(_, pair)| pair).collect()
}

/// Returns the number and the text of a token that metadata names, or that llama.cpp takes for it in a tokenizer of the kind of Llama 2.
fn special<'a>(content: &'a Content, tokens: &Tokens<'a>, name: &str) -> Result<Option<(usize, &'a str)>> {
    const OF_LLAMA: [(&str, usize, i32); 3] =
        [("unknown", 0, UNKNOWN), ("bos", 1, CONTROL), ("eos", 2, CONTROL)];
    let is_llama = content.text(&key("model"))? == Some("llama");
    let by_default = OF_LLAMA
        .into_iter()
        .find(|(known, id, kind)| is_llama && *known == name && tokens.kinds.get(*id) == Some(kind));
    let id = content.size(&key(&format!("{name}_token_id")))?.or(by_default.map(|(_, id, _)| id));
    Ok(id.and_then(|id| Some((id, &**tokens.texts.get(id)?))))
}

/// Returns what adds tokens at the beginning or the end of a text.
fn template(content: &Content, tokens: &Tokens<'_>) -> Result<Option<Json>> {
    let model = content.text(&key("model"))?;
    const BEGINS: [&str; 4] = ["llama-bpe", "llama3", "llama-v3", "tekken"];
    let by_default =
        model == Some("llama") || content.text(&key("pre"))?.is_some_and(|pre| BEGINS.contains(&pre));
    let ends = [("add_bos_token", "bos", by_default), ("add_eos_token", "eos", false)];
    let (mut single, mut known) = (vec![json!({ "Sequence": { "id": "A", "type_id": 0 } })], Map::new());
    for (place, (flag, name, default)) in ends.into_iter().enumerate() {
        let is_added = content.flag(&key(flag))?.unwrap_or(default);
        let Some((id, text)) = special(content, tokens, name)?.filter(|_| is_added) else { continue };
        let at = if place == 0 { 0 } else { single.len() };
        single.insert(at, json!({ "SpecialToken": { "id": text, "type_id": 0 } }));
        known.insert(text.into(), json!({ "id": text, "ids": [id], "tokens": [text] }));
    }
    let pair = [&single[..], &[json!({ "Sequence": { "id": "B", "type_id": 0 } })]].concat();
    let is_plain = known.is_empty();
    Ok((!is_plain).then(
        || json!({ "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known }),
    ))
}

/// Returns what `tokenizer_config.json` would have.
pub(super) fn settings(content: &Content) -> Result<Option<Vec<u8>>> {
    let mut all = Map::new();
    if content.texts(&key("tokens"))?.is_some() {
        let tokens = Tokens::of(content)?;
        for (name, field) in
            [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")]
        {
            let token = special(content, &tokens, name)?;
            token.into_iter().for_each(|(_, text)| drop(all.insert(field.into(), text.into())));
        }
    }
    let template = |name: &str| content.text(&format!("tokenizer.{name}"));
    let (default, with_tools) = (template("chat_template")?, template("chat_template.tool_use")?);
    let given = match (default, with_tools) {
        (Some(default), Some(with_tools)) => Some(json!([
            { "name": "default", "template": default }, { "name": "tool_use", "template": with_tools }
        ])),
        (default, _) => default.map(Json::from),
    };
    given.into_iter().for_each(|given| drop(all.insert("chat_template".into(), given)));
    if all.is_empty() {
        return Ok(None);
    }
    all.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
    Ok(Some(Json::Object(all).to_string().into()))
}

/// Returns what `generation_config.json` would have: the tokens that end a text, if there are several.
pub(super) fn generation(content: &Content) -> Result<Option<Vec<u8>>> {
    let mut all = Vec::new();
    for name in ["eos", "eot", "eom"] {
        let id = content.size(&key(&format!("{name}_token_id")))?;
        all.extend(id.filter(|id| !all.contains(id)));
    }
    Ok((all.len() > 1).then(|| json!({ "eos_token_id": all }).to_string().into()))
}
