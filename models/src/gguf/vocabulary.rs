//! The tokenizer and the chat template of a folder, as a GGUF file has them.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

use crate::gguf_file::{BYTE, CONTROL, EXPRESSIONS, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Value};
use crate::reading::read_config;
use crate::tokenizer::{CONFIG, FILE, text_of_token};
use crate::tokens::{NamedTemplate, template_text};
use crate::{Error, Result, Tokenizer};

/// The name of the tokenizers that normalize a text first, as those of Qwen do, and of those that divide it in the same way without.
const NORMALIZED: &str = "qwen2";
const NOT_NORMALIZED: &str = "deepseek-r1-qwen";

/// Returns the metadata of a folder's tokenizer, for a model with so many tokens, and of its chat template or the one to take in its
/// place.
pub(super) fn of_folder(
    folder: &Path,
    template: Option<&NamedTemplate>,
    vocab_size: usize,
) -> Result<Vec<(String, Value)>> {
    let (tokenizer, json) = Tokenizer::with_json(folder)?;
    tokenizer.check_size(vocab_size)?;
    let known = Pairs::of(&json).and_then(|pairs| Some((Kind::of(&json, &pairs)?, pairs)));
    let Some((kind, pairs)) = known else {
        let problem = "llama.cpp has no name for this tokenizer, and would divide text otherwise; known are those of GPT-2, \
                       Llama 2 and 3, SmolLM2, Mistral and Qwen";
        return Err(Error::Format { path: folder.join(FILE), problem: problem.into() });
    };
    if let Some(problem) = other_texts(&json, &kind) {
        return Err(Error::Format { path: folder.join(FILE), problem });
    }
    let mut all = Vec::new();
    let mut put = |key: &str, value: Value| all.push((format!("tokenizer.ggml.{key}"), value));
    let (tokens, kinds) = tokens(&json, &pairs, vocab_size, matches!(kind, Kind::Sentence { .. }));
    match kind {
        Kind::Bytes { name } => {
            put("model", "gpt2".into());
            put("pre", name.into());
            put("merges", Value::Strings(pairs.merges.iter().map(|(a, b)| format!("{a} {b}")).collect()));
        }
        Kind::Sentence { begins_with_space } => {
            put("model", "llama".into());
            put("pre", "default".into());
            put("scores", Value::F32s(scores(&tokens, &pairs)));
            put("add_space_prefix", Value::Bool(begins_with_space));
        }
    }
    put("tokens", Value::Strings(tokens));
    put("token_type", Value::I32s(kinds));
    let config = read_config(folder)?;
    let [before, after] =
        added(&tokenizer).map_err(|problem| Error::Format { path: folder.join(FILE), problem })?;
    for (field, key, added) in [
        ("bos_token", "bos", before),
        ("eos_token", "eos", after),
        ("unk_token", "unknown", None),
        ("pad_token", "padding", None),
    ] {
        let id = config.get(field).and_then(text_of_token).and_then(|text| tokenizer.token(text));
        let id = id.or_else(|| tokenizer.end_of_text().filter(|_| field == "eos_token" && added.is_none()));
        if let (Some(id), Some(added)) = (id, added)
            && id != added
        {
            let problem = format!(
                "it adds token {added} to a text, and `{field}` of {CONFIG} is token {id}, which is what a GGUF file would add"
            );
            return Err(Error::Format { path: folder.join(FILE), problem });
        }
        id.or(added).into_iter().for_each(|id| put(&format!("{key}_token_id"), Value::U32(id)));
    }
    put("add_bos_token", Value::Bool(before.is_some()));
    put("add_eos_token", Value::Bool(after.is_some()));
    let template = match template {
        Some(named) => Some(named.text()?),
        None => template_text(folder)?,
    };
    if let Some(template) = template {
        all.push(("tokenizer.chat_template".into(), Value::String(template)));
    }
    Ok(all)
}

/// Returns the token that the tokenizer adds before a text, and the one behind it.
fn added(tokenizer: &Tokenizer) -> std::result::Result<[Option<u32>; 2], String> {
    let of = |whole: Result<Vec<u32>>| whole.map_err(|error| error.to_string());
    let (alone, whole) = (of(tokenizer.encode("a"))?, of(tokenizer.encode_whole("a"))?);
    let place = (0..whole.len()).find(|place| whole[*place..].starts_with(&alone));
    let (before, after) = match place {
        Some(place) => (&whole[..place], &whole[place + alone.len()..]),
        None => (&[][..], &whole[..]),
    };
    match (before, after) {
        (before, after) if place.is_some() && before.len() < 2 && after.len() < 2 => {
            Ok([before.first().copied(), after.first().copied()])
        }
        _ => Err(format!(
            "it makes {whole:?} of the tokens {alone:?} of a text; a GGUF file has a place for one token before a text, and \
             one behind it"
        )),
    }
}

/// Tokens that are made by merging pairs.
struct Pairs<'a> {
    vocab: HashMap<&'a str, usize>,
    /// In the order in which they are merged.
    merges: Vec<(&'a str, &'a str)>,
}

impl<'a> Pairs<'a> {
    /// `None` if the tokenizer works otherwise.
    fn of(json: &'a Json) -> Option<Self> {
        let model = json.get("model")?;
        let is_pairs = model.get("type").is_none_or(|kind| kind == "BPE");
        let is_empty = |name: &str| model.get(name).and_then(Json::as_str).unwrap_or_default().is_empty();
        if !is_pairs || !is_empty("continuing_subword_prefix") || !is_empty("end_of_word_suffix") {
            return None;
        }
        let merge = |merge: &'a Json| match merge {
            Json::String(both) => both.split_once(' '),
            Json::Array(both) => Some((both.first()?.as_str()?, both.get(1)?.as_str()?)),
            _ => None,
        };
        let id = |(text, id): (&'a String, &Json)| Some((text.as_str(), usize::try_from(id.as_u64()?).ok()?));
        Some(Self {
            vocab: model.get("vocab")?.as_object()?.iter().map(id).collect::<Option<_>>()?,
            merges: model.get("merges")?.as_array()?.iter().map(merge).collect::<Option<_>>()?,
        })
    }
}

/// How a tokenizer works.
enum Kind {
    /// Characters stand for bytes, since GPT-2; `name` is how text is divided first.
    Bytes { name: &'static str },
    /// Characters stand for themselves and bytes are a fallback, since Llama 2.
    Sentence { begins_with_space: bool },
}

impl Kind {
    /// `None` if llama.cpp has no such tokenizer.
    fn of(json: &Json, pairs: &Pairs<'_>) -> Option<Self> {
        let normalizers = list(json, "normalizer", "normalizers");
        let before = list(json, "pre_tokenizer", "pretokenizers");
        let is = |part: &Json, kind: &str| part.get("type").is_some_and(|found| found == kind);
        if json["model"]["byte_fallback"] == true {
            let is_known = |part: &&Json| {
                is(part, "Prepend") && part["prepend"] == "\u{2581}"
                    || is(part, "Replace")
                    || is(part, "Metaspace")
            };
            let all: Vec<&Json> = normalizers.iter().chain(&before).copied().collect();
            let prepends = |part: &&Json| {
                is(part, "Prepend") || is(part, "Metaspace") && part["prepend_scheme"] != "never"
            };
            let begins_with_space = all.iter().any(prepends);
            return all.iter().all(is_known).then_some(Self::Sentence { begins_with_space });
        }
        if !normalizers.iter().all(|part| is(part, "NFC")) {
            return None;
        }
        let bytes = |part: &Json, divides: bool| {
            // The field is true where it is missing.
            is(part, "ByteLevel")
                && part["add_prefix_space"] != true
                && (part["use_regex"] != false) == divides
        };
        let split = |part: &Json| {
            let expression = part["pattern"]["Regex"].as_str()?;
            let is_plain = is(part, "Split") && part["behavior"] == "Isolated" && part["invert"] != true;
            EXPRESSIONS.iter().find(|(_, known)| is_plain && *known == expression).map(|(name, _)| *name)
        };
        let digits = |part: &Json| is(part, "Digits") && part["individual_digits"] == true;
        let name = match before[..] {
            // Without merges each byte is a token, however text is divided.
            [only] if pairs.merges.is_empty() && bytes(only, false) => "gpt-2",
            [only] if bytes(only, true) => "gpt-2",
            [first, last] if digits(first) && bytes(last, true) => "smollm",
            [first, last] if bytes(last, false) => split(first)?,
            _ => return None,
        };
        Some(Self::Bytes {
            name: if name == NORMALIZED && normalizers.is_empty() { NOT_NORMALIZED } else { name },
        })
    }
}

/// Says what a tokenizer does with texts that neither llama.cpp nor a reader of the file would do, since the file has no place for it.
fn other_texts(json: &Json, kind: &Kind) -> Option<String> {
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let field = ["lstrip", "rstrip", "single_word"].into_iter().find(|field| token[*field] == true);
        if let Some(field) = field {
            let token = &token["content"];
            return Some(format!(
                "the token {token} has {field}, which a GGUF file has no place for: texts with it would have other tokens; set it to false if none has"
            ));
        }
    }
    let Kind::Bytes { name } = kind else { return None };
    let is_other = *name != NORMALIZED && !list(json, "normalizer", "normalizers").is_empty();
    is_other.then(|| {
        format!("its normalizer is NFC, and llama.cpp's name for it, {name}, stands for none: texts would have other tokens")
    })
}

/// Returns the parts of a field that is one, a sequence, or null.
fn list<'a>(json: &'a Json, field: &str, parts: &str) -> Vec<&'a Json> {
    match json.get(field) {
        None | Some(Json::Null) => Vec::new(),
        Some(one) => match one.get(parts).and_then(Json::as_array) {
            Some(all) => all.iter().collect(),
            None => vec![one],
        },
    }
}

/// Returns the texts of all tokens, and their kinds. Ids without a token, up to the model's vocabulary, are unused.
fn tokens(json: &Json, pairs: &Pairs<'_>, vocab_size: usize, has_bytes: bool) -> (Vec<String>, Vec<i32>) {
    let mut all: Vec<(String, i32)> = (0..vocab_size).map(|id| (format!("[PAD{id}]"), UNUSED)).collect();
    let unknown = json["model"]["unk_token"].as_str();
    for (text, id) in &pairs.vocab {
        let kind = match *text {
            text if unknown == Some(text) => UNKNOWN,
            text if has_bytes && is_byte(text) => BYTE,
            _ => NORMAL,
        };
        if let Some(token) = all.get_mut(*id) {
            *token = (text.to_string(), kind);
        }
    }
    for added in json["added_tokens"].as_array().into_iter().flatten() {
        let place = added["id"].as_u64().and_then(|id| usize::try_from(id).ok());
        let (Some(token), Some(text)) = (place.and_then(|id| all.get_mut(id)), added["content"].as_str())
        else {
            continue;
        };
        if token.1 != UNKNOWN {
            *token = (text.into(), if added["special"] == true { CONTROL } else { USER_DEFINED });
        }
    }
    all.into_iter().unzip()
}

/// Whether a token is a byte's, such as `<0x0A>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
}

/// Returns a score for each token: of two pairs that could be merged, the one whose token has the higher score is, which is the one
/// that the tokenizer merges first.
fn scores(tokens: &[String], pairs: &Pairs<'_>) -> Vec<f32> {
    let mut first: HashMap<String, usize> = HashMap::with_capacity(pairs.merges.len());
    for (place, (a, b)) in pairs.merges.iter().enumerate() {
        first.entry(format!("{a}{b}")).or_insert(place);
    }
    tokens.iter().map(|text| first.get(text).map_or(0.0, |place| -(*place as f32) - 1.0)).collect()
}
