//! Tokenizers, compared with the Python package of the same name.

use std::fs;

use crate::common::folder;
use models::{ModelConfig, Tokenizer};
use serde_json::Value;

#[test]
fn tokens_are_pythons_and_rows_are_not_cut() {
    let tokenizer = Tokenizer::from_folder(&folder("tokenizer")).unwrap();
    let cases: Value =
        serde_json::from_slice(&fs::read(folder("tokenizer").join("expected.json")).unwrap()).unwrap();
    let numbers = |ids: &Value| -> Vec<u32> {
        ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    for case in cases.as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(ids, numbers(&case["ids"]), "{text}");
        assert_eq!(tokenizer.encode_whole(text).unwrap(), numbers(&case["with_special"]), "{text}");
        let plain = text.replace("</s>", "");
        assert_eq!(tokenizer.decode(&ids).unwrap(), plain);
        let mut stream = tokenizer.stream();
        let pieces: String = ids.iter().filter_map(|id| stream.push(*id).unwrap()).collect();
        assert_eq!(pieces + &stream.rest().unwrap(), plain);
    }
    assert_eq!((tokenizer.end_of_text(), tokenizer.token("<s>"), tokenizer.len()), (Some(1), Some(0), 300));
    let model = ModelConfig::from_folder(&folder("llama")).unwrap();
    let line = tokenizer.check(&model).unwrap_err().to_string();
    assert!(line.contains("300 tokens for a model of 96"), "{line}");
}

/// Tokens that are not valid UTF-8 by themselves, as a model may generate them.
#[test]
fn nothing_is_lost_where_bytes_are_no_text() {
    let byte_level = r#"{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}"#;
    let cases = [
        // Each token is a whole character and the first byte of another that is never completed.
        (byte_level, ["aØ", "a", "Ã", "©"], vec![0, 0, 0], ["a", "\u{fffd}a", "\u{fffd}a"], "\u{fffd}"),
        // A character of two tokens, then half of one at the end.
        (byte_level, ["aØ", "a", "Ã", "©"], vec![2, 3, 2], ["", "é", ""], "\u{fffd}"),
        // A stray byte makes the decoder replace the character before it, which was already returned.
        (
            r#"{"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}"#,
            ["<0xC3>", "<0xA9>", "<0xD8>", "b"],
            vec![0, 1, 2, 3],
            ["é", "", "\u{fffd}b"],
            "",
        ),
    ];
    for (decoder, vocabulary, tokens, pieces, rest) in cases {
        let vocabulary: Vec<String> =
            vocabulary.iter().enumerate().map(|(id, token)| format!("{token:?}: {id}")).collect();
        let json = format!(
            r#"{{"version": "1.0", "added_tokens": [], "decoder": {decoder},
                "model": {{"type": "WordLevel", "vocab": {{{}}}, "unk_token": "a"}}}}"#,
            vocabulary.join(", ")
        );
        let out = tempfile::tempdir().unwrap();
        fs::write(out.path().join("tokenizer.json"), json).unwrap();
        let tokenizer = Tokenizer::from_folder(out.path()).unwrap();
        let mut stream = tokenizer.stream();
        let got: Vec<String> =
            tokens.iter().map(|token| stream.push(*token).unwrap().unwrap_or_default()).collect();
        assert_eq!(got[got.len() - pieces.len()..], pieces);
        assert_eq!(stream.rest().unwrap(), rest);
    }
}

#[test]
fn made_tokenizers_are_read_back() {
    let text = "Où est\tla 🕯️?\n";
    for made in [Tokenizer::bytes().unwrap(), Tokenizer::characters(text).unwrap()] {
        let out = tempfile::tempdir().unwrap();
        made.save(out.path()).unwrap();
        let read = Tokenizer::from_folder(out.path()).unwrap();
        assert_eq!((read.len(), read.end_of_text()), (made.len(), made.end_of_text()));
        assert_eq!(made.end_of_text(), Some(made.len() as u32 - 1));
        for tokenizer in [&made, &read] {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokens, made.encode_whole(text).unwrap());
            assert_eq!(tokenizer.decode(&tokens).unwrap(), text);
        }
        // The library's result for the same description.
        let path = out.path().join("tokenizer.json");
        let general = tokenizers::Tokenizer::from_file(&path).unwrap();
        assert_eq!(general.encode(text, false).unwrap().get_ids(), made.encode(text).unwrap());
    }
    let read = Tokenizer::characters("ab").unwrap();
    assert!(read.encode("abc").unwrap_err().to_string().contains("'c' at byte 2"));
    assert!(Tokenizer::characters("").is_err());
}

#[test]
fn tokenizers_that_cannot_be_are_named() {
    let out = tempfile::tempdir().unwrap();
    let line = || Tokenizer::from_folder(out.path()).unwrap_err().to_string();
    assert!(line().contains("tokenizer.json"));
    for text in ["{", "{}", r#"{"model": {"type": "other"}}"#] {
        fs::write(out.path().join("tokenizer.json"), text).unwrap();
        assert!(line().contains("tokenizer.json") && !line().contains('\n'), "{}", line());
    }
}

#[test]
fn an_end_of_text_that_is_no_token_is_named() {
    let out = tempfile::tempdir().unwrap();
    Tokenizer::bytes().unwrap().save(out.path()).unwrap();
    let end = |eos_token: &str| {
        let config = format!("{{\"eos_token\": {eos_token}}}");
        fs::write(out.path().join("tokenizer_config.json"), config).unwrap();
        Tokenizer::from_folder(out.path()).map(|tokenizer| tokenizer.end_of_text())
    };
    assert_eq!(end("\"a\"").unwrap(), Some(97));
    assert_eq!(end("{\"content\": \"b\"}").unwrap(), Some(98));
    assert_eq!(end("null").unwrap(), None);
    for given in ["7", "\"<|no such token|>\"", "[\"a\"]", "{\"content\": null}"] {
        let line = end(given).unwrap_err().to_string();
        assert!(line.contains("tokenizer_config.json: `eos_token` is "), "{line}");
    }
}

#[test]
fn folders_without_a_tokenizer_say_how_to_get_one() {
    let folder = tempfile::tempdir().unwrap();
    let line = || Tokenizer::from_folder(folder.path()).unwrap_err().to_string();
    assert!(line().contains("cannot read"), "{}", line());
    for name in ["vocab.json", "merges.txt"] {
        fs::write(folder.path().join(name), "{}").unwrap();
    }
    let path = folder.path().display();
    let parts = [
        "no tokenizer.json, but vocab.json and merges.txt; ",
        &format!("T.from_pretrained('{path}').save_pretrained('{path}')"),
    ];
    assert!(parts.iter().all(|part| line().contains(part)) && !line().contains('\n'), "{}", line());
}

#[test]
fn a_name_on_the_hub_is_told_from_a_folder() {
    let line = |name: &str| Tokenizer::from_folder(name.as_ref()).unwrap_err().to_string();
    let found = line("Qwen/Qwen3-0.6B");
    assert!(
        found.contains("`hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B`") && !found.contains('\n'),
        "{found}"
    );
    assert_eq!(ModelConfig::from_folder("Qwen/Qwen3-0.6B".as_ref()).unwrap_err().to_string(), found);
    for other in ["no-folder", "./Qwen/Qwen3", "/Qwen/Qwen3", "src/Qwen3", "a/b/c"] {
        assert!(line(other).contains("cannot read"), "{}", line(other));
    }
}
