//! Prompts and completions.

use std::fs;
use std::path::Path;

use models::Tokenizer;
use models::tokens::{ChatTemplate, Data, DataConfig, IGNORE_INDEX, Piece, Rows, TextEncoder, TextSource};

use crate::chats::with_template;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

/// Returns the rows of a file of this content.
fn open(folder: &Path, name: &str, content: &str, field: Option<&str>) -> models::Result<Rows> {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    let tokenizer = Tokenizer::bytes().unwrap();
    let config = DataConfig {
        tokenizer: Some(&tokenizer),
        folder: Some(folder),
        field,
        length: Some(64),
        is_padded: true,
        ..DataConfig::default()
    };
    Data::open(&[path.display().to_string().parse().unwrap()], &config)
}

/// Returns the text of the first row that counts.
fn counted(rows: &Rows) -> String {
    let row = rows.get(0).unwrap();
    let targets = row.targets.iter().filter(|target| **target != IGNORE_INDEX);
    let tokens: Vec<u32> = targets.map(|target| u32::try_from(*target).unwrap()).collect();
    tokens.iter().map(|token| if *token == 256 { '$' } else { char::from(*token as u8) }).collect()
}

#[test]
fn completions_count_and_prompts_do_not() {
    let folder = with_template(TEMPLATE);
    let counts =
        |name: &str, content: &str, field| counted(&open(folder.path(), name, content, field).unwrap());
    let text = r#"{"prompt": "1 + 1 =", "completion": " 2"}"#;
    assert_eq!(counts("a.jsonl", text, None), " 2$");
    assert_eq!(counts("a.jsonl", text, Some("completion")), " 2$");
    assert_eq!(counts("a.jsonl", text, Some("prompt")), " + 1 =$");
    assert_eq!(counts("a.csv", "id,completion,prompt\n1,\" 2\",1 + 1 =\n", None), " 2$");
    assert_eq!(counts("a.jsonl", r#"{"prompt": "", "completion": "abc"}"#, None), "bc$");
    let chat = |completion: &str| {
        format!(r#"{{"prompt": [{{"role": "user", "content": "hi"}}], "completion": [{completion}]}}"#)
    };
    let answer = r#"{"role": "assistant", "content": "a"}"#;
    assert_eq!(counts("a.jsonl", &chat(answer), None), "a\n");
    // All behind the prompt counts, unless some of it is said not to.
    let more =
        format!(r#"{answer}, {{"role": "user", "content": "b"}}, {{"role": "assistant", "content": "c"}}"#);
    assert_eq!(counts("a.jsonl", &chat(&more), None), "a\n<user>b\n<assistant>c\n");
    let some = more.replacen("\"a\"", "\"a\", \"train\": false", 1);
    assert_eq!(counts("a.jsonl", &chat(&some), None), "c\n");
    // An answer of the prompt does not count.
    let prompt =
        format!(r#"{{"prompt": [{answer}, {{"role": "user", "content": "b"}}], "completion": [{answer}]}}"#);
    assert_eq!(counts("a.jsonl", &prompt, None), "a\n");
}

#[test]
fn a_text_that_ends_with_the_end_token_has_one() {
    let folder = with_template(TEMPLATE);
    let tokenizer = Tokenizer::from_folder(folder.path()).unwrap();
    let end = tokenizer.end_of_text().unwrap();
    let encoder = TextEncoder::new(&tokenizer, ChatTemplate::from_folder(folder.path()).unwrap()).unwrap();
    for ending in ["", &tokenizer.decode(&[end]).unwrap()] {
        let path = folder.path().join("a.jsonl");
        fs::write(&path, serde_json::json!({"prompt": "a", "completion": format!("b{ending}")}).to_string())
            .unwrap();
        let mut writer =
            models::tokens::TokenWriter::create(&folder.path().join("t"), tokenizer.len(), Some(end))
                .unwrap();
        encoder.write(&mut TextSource::open(&path, None).unwrap(), &mut writer, |_| {}).unwrap();
        let file = writer.finish().unwrap();
        let tokens = file.read(0..file.tokens()).unwrap();
        assert_eq!(tokens.iter().filter(|token| **token == end).count(), 1, "{tokens:?}");
        assert_eq!(tokens.last(), Some(&end));
    }
}

#[test]
fn a_prompt_without_a_completion_is_told_with_its_line() {
    let folder = with_template(TEMPLATE);
    let good = r#"{"prompt": "a", "completion": "b"}"#;
    for (line, says) in [
        (r#"{"prompt": "a"}"#, "there is a `prompt` without a `completion`; give both"),
        (r#"{"prompt": "a", "completion": ""}"#, "there is a `prompt` without a `completion`"),
        (r#"{"prompt": [{"role": "user"}], "completion": []}"#, "there is a `prompt` without a `completion`"),
        (
            r#"{"completion": "a"}"#,
            "there is a `completion` without a `prompt`; give both, or --field completion",
        ),
        (
            r#"{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}"#,
            "`prompt` is a string, and `completion` is a list; give two strings, or two lists",
        ),
        (r#"{"prompt": 1, "completion": "a"}"#, "`prompt` is a number, and `completion` is a string"),
        (r#"{"text": "a", "prompt": "a", "completion": "b"}"#, "both `text` and `completion` are filled"),
        (r#"{"prompt": [1], "completion": [2]}"#, "message 0 has no `role`"),
        (
            r#"{"prompt": [], "completion": [{"role": "assistant", "content": "b", "weight": 0}]}"#,
            "no answer of the completion is to be trained on",
        ),
    ] {
        let said =
            open(folder.path(), "a.jsonl", &format!("{good}\n{line}\n"), None).unwrap_err().to_string();
        assert!(
            said.contains("a.jsonl: line 2: ") && said.contains(says) && !said.contains('\n'),
            "{line}: {said}"
        );
    }
    let said = open(folder.path(), "a.csv", "prompt,completion\na,b\nc,\n", None).unwrap_err().to_string();
    assert!(said.contains("a.csv: line 3: there is a `prompt` without a `completion`"), "{said}");
    let said = open(folder.path(), "a.csv", "prompt\na\n", None).unwrap_err().to_string();
    assert!(said.contains("no column `text`, `messages` or `completion`, but prompt"), "{said}");
    // A text may have a prompt beside it.
    let path = folder.path().join("b.jsonl");
    fs::write(&path, r#"{"text": "a", "prompt": "b"}"#).unwrap();
    let piece = TextSource::open(&path, None).unwrap().next_piece().unwrap();
    assert!(matches!(piece, Some(Piece::Text { text, .. }) if text == "a"));
}
