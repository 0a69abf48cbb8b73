//! Byte and character tokenizers in the format of `tokenizer.json`: byte-pair encoding without merges.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{END, Kind};

/// Returns the `tokenizer.json` of a tokenizer with one token per character, in this order. The characters stand for
/// bytes (`are_bytes`) or for themselves.
pub(super) fn description(characters: &[char], are_bytes: bool) -> Value {
    let vocab: Map<String, Value> = characters
        .iter()
        .zip(0u32..)
        .map(|(character, token)| (character.to_string(), token.into()))
        .collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let (before, decoder) = match are_bytes {
        true => (byte_level.clone(), byte_level),
        false => (Value::Null, json!({ "type": "Fuse" })),
    };
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": characters.len(), "content": END, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": before,
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    })
}

/// Returns the kind of tokenizer that a `tokenizer.json` describes: `General` unless it equals one that is made here.
pub(super) fn kind(json: &Value) -> Kind {
    let Some(vocab) = json["model"]["vocab"].as_object() else { return Kind::General };
    let character = |(name, token): (&String, &Value)| {
        let mut characters = name.chars();
        let token = token.as_u64().and_then(|token| u32::try_from(token).ok())?;
        Some((characters.next().filter(|_| characters.next().is_none())?, token))
    };
    let Some(all) = vocab.iter().map(character).collect::<Option<HashMap<char, u32>>>() else {
        return Kind::General;
    };
    let mut characters: Vec<(char, u32)> =
        all.iter().map(|(character, token)| (*character, *token)).collect();
    characters.sort_unstable_by_key(|(_, token)| *token);
    let characters: Vec<char> = characters.into_iter().map(|(character, _)| character).collect();
    if !all.values().all(|token| (*token as usize) < characters.len()) {
        return Kind::General;
    }
    match [true, false].into_iter().find(|are_bytes| description(&characters, *are_bytes) == *json) {
        Some(true) if characters == byte_alphabet() => Kind::Bytes,
        Some(false) => Kind::Characters(all),
        _ => Kind::General,
    }
}

/// Returns the characters that stand for bytes in byte-level tokenizers since GPT-2: printable bytes stand for
/// themselves, others are numbered from code point 256.
pub(crate) fn byte_alphabet() -> Vec<char> {
    let mut hidden = 256u32..;
    let stands = |byte: u8| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        _ => hidden.next().and_then(char::from_u32).unwrap_or_default(),
    };
    (0..=255).map(stands).collect()
}
