//! Pairs of answers: what counts, what stays together, and what is refused.

use std::fs;
use std::path::Path;

use models::Tokenizer;
use models::tokens::{Data, DataConfig, IGNORE_INDEX, Rows, TooLong};

use crate::chats::with_template;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

fn open(folder: &Path, name: &str, content: &str, length: usize, too_long: TooLong) -> models::Result<Rows> {
    let path = folder.join(name);
    fs::write(&path, content).unwrap();
    let tokenizer = Tokenizer::bytes().unwrap();
    let config = DataConfig {
        tokenizer: Some(&tokenizer),
        folder: Some(folder),
        pairs: true,
        length: Some(length),
        too_long,
        ..DataConfig::default()
    };
    Data::open(&[path.display().to_string().parse().unwrap()], &config)
}

fn shown(tokens: impl IntoIterator<Item = u32>) -> String {
    tokens.into_iter().map(|token| if token == 256 { '$' } else { char::from(token as u8) }).collect()
}

/// Of each document of all rows: its inputs, and its targets that count.
fn documents(rows: &Rows) -> Vec<Vec<(String, String)>> {
    let of_row = |index: usize| {
        let (row, mut begin) = (rows.get(index).unwrap(), 0);
        let mut found = Vec::new();
        for len in row.documents.iter().map(|len| *len as usize) {
            let targets = row.targets[begin..begin + len].iter().filter(|target| **target != IGNORE_INDEX);
            let targets = targets.map(|target| u32::try_from(*target).unwrap());
            found.push((shown(row.tokens[begin..begin + len].to_vec()), shown(targets)));
            begin += len;
        }
        assert!(row.targets[begin..].iter().all(|target| *target == IGNORE_INDEX));
        found
    };
    (0..rows.len()).map(of_row).collect()
}

fn pair(chosen: (&str, &str), rejected: (&str, &str)) -> Vec<(String, String)> {
    [chosen, rejected].map(|(whole, answer)| (whole.to_string(), answer.to_string())).into()
}

#[test]
fn answers_count_and_prompts_do_not() {
    let folder = with_template(TEMPLATE);
    let of = |name: &str, content: &str| {
        let rows = open(folder.path(), name, content, 64, TooLong::default()).unwrap();
        assert!(rows.has_pairs());
        documents(&rows).remove(0)
    };
    let expected = pair(("ab c$", "c$"), ("ab def$", "def$"));
    assert_eq!(of("a.jsonl", r#"{"prompt": "ab ", "chosen": "c", "rejected": "def"}"#), expected);
    assert_eq!(of("a.csv", "rejected,prompt,chosen\ndef,ab ,c\n"), expected);
    // What both begin with is the prompt; a space before the answers is theirs.
    let of_both = pair(("ab c$", " c$"), ("ab def$", " def$"));
    assert_eq!(of("a.jsonl", r#"{"chosen": "ab c", "rejected": "ab def"}"#), of_both);
    // Without any prompt, the first token has nothing to be predicted from.
    let without = pair(("abc$", "bc$"), ("xyz$", "yz$"));
    assert_eq!(of("a.jsonl", r#"{"prompt": "", "chosen": "abc", "rejected": "xyz"}"#), without);
    // An empty prompt is one; in a table of text it is none.
    let empty = pair(("abc$", "bc$"), ("abd$", "bd$"));
    assert_eq!(of("a.jsonl", r#"{"prompt": "", "chosen": "abc", "rejected": "abd"}"#), empty);
    let of_table = pair(("abc$", "c$"), ("abd$", "d$"));
    assert_eq!(of("a.csv", "prompt,chosen,rejected\n,abc,abd\n"), of_table);
    assert_eq!(of("a.jsonl", r#"{"prompt": null, "chosen": "abc", "rejected": "abd"}"#), of_table);
    let answers = [("b", "chosen"), ("c", "rejected")];
    let message = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
    let [with, alone] = [true, false].map(|is_alone| {
        let user = message("user", "a");
        let lists = answers.map(|(answer, name)| {
            let begin = if is_alone { String::new() } else { format!("{user}, ") };
            format!(r#""{name}": [{begin}{}]"#, message("assistant", answer))
        });
        let prompt = if is_alone { format!(r#""prompt": [{user}], "#) } else { r#""prompt": "a", "#.into() };
        format!("{{{prompt}{}, {}}}", lists[0], lists[1])
    });
    let chats = pair(("<user>a\n<assistant>b\n", "b\n"), ("<user>a\n<assistant>c\n", "c\n"));
    assert_eq!([of("a.jsonl", &with), of("a.jsonl", &alone)], [chats.clone(), chats]);
}

/// Only a table of text has messages as JSON; other strings are answers.
#[test]
fn answers_that_are_json_are_texts() {
    let folder = with_template(TEMPLATE);
    let of = |name: &str, content: &str| {
        documents(&open(folder.path(), name, content, 192, TooLong::default()).unwrap()).remove(0)
    };
    let messages = |answer: &str| {
        format!(r#"[{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "{answer}"}}]"#)
    };
    let [b, c] = ["b", "c"].map(messages);
    let line = serde_json::json!({ "prompt": "p", "chosen": b, "rejected": c }).to_string();
    let ends = |text: &str| format!("{text}$");
    let expected = pair((&format!("p{b}$"), &ends(&b)), (&format!("p{c}$"), &ends(&c)));
    assert_eq!(of("a.jsonl", &line), expected);
    let row = |name: &str, answers: [&str; 2]| {
        let [chosen, rejected] = answers.map(|answer| answer.replace('"', "\"\""));
        of(name, &format!("chosen,rejected\n\"{chosen}\",\"{rejected}\"\n"))
    };
    let chats = pair(("<user>a\n<assistant>b\n", "b\n"), ("<user>a\n<assistant>c\n", "c\n"));
    assert_eq!(row("a.csv", [&b, &c]), chats);
    let found = row("a.csv", [r#"[{"x":1}]"#, r#"[{"x":2}]"#]);
    assert_eq!(found, pair((r#"[{"x":1}]$"#, "1}]$"), (r#"[{"x":2}]$"#, "2}]$")));
}

/// Pairs fill rows by best fit, and none is divided; those that are too long are left out and counted.
#[test]
fn pairs_stay_together() {
    let folder = with_template(TEMPLATE);
    let line = |count: usize| {
        let [chosen, rejected] = ["x", "y"].map(|letter| letter.repeat(count));
        format!("{{\"prompt\": \"\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}\n")
    };
    // Of 8, 12, 20 and 6 tokens.
    let content: String = [3, 5, 9, 2].map(line).concat();
    for too_long in [TooLong::Cut, TooLong::Truncate, TooLong::Drop] {
        let rows = open(folder.path(), "a.jsonl", &content, 18, too_long).unwrap();
        let lengths: Vec<Vec<u32>> = (0..rows.len()).map(|row| rows.get(row).unwrap().documents).collect();
        assert_eq!(lengths, [vec![4, 4], vec![6, 6, 3, 3]], "{too_long}");
        let report = rows.packing().unwrap();
        assert_eq!((report.documents, report.cut, report.dropped), (4, 0, 1), "{too_long}");
    }
    let rows = open(folder.path(), "a.jsonl", &content, 18, TooLong::default()).unwrap();
    let error = open(folder.path(), "a.jsonl", &content, 18, TooLong::Error).unwrap_err().to_string();
    assert!(error.contains("pair 3 has 20 tokens, and rows have 18"), "{error}");
    // A fingerprint tells pairs from the same documents.
    let other = open(folder.path(), "b.jsonl", &content, 20, TooLong::default()).unwrap();
    assert_ne!(rows.fingerprint(), other.fingerprint());
}

#[test]
fn what_is_no_pair_is_refused() {
    let folder = with_template(TEMPLATE);
    let refuse = |content: &str| {
        open(folder.path(), "a.jsonl", content, 64, TooLong::default()).unwrap_err().to_string()
    };
    let (user, answer) = (r#"{"role": "user", "content": "a"}"#, r#"{"role": "assistant", "content": "b"}"#);
    for (content, said) in [
        (r#"{"chosen": "a"}"#.to_string(), "there is no `rejected`, or it is empty"),
        (r#"{"chosen": "a", "rejected": ""}"#.into(), "there is no `rejected`, or it is empty"),
        (r#"{"chosen": "a", "rejected": "a"}"#.into(), "are equal: nothing is preferred"),
        (
            format!(r#"{{"chosen": [{user}, {answer}], "rejected": [{user}]}}"#),
            "is the beginning of the other",
        ),
        (
            format!(r#"{{"chosen": [{user}, {answer}], "rejected": [{answer}]}}"#),
            "begin with different messages",
        ),
        (
            format!(
                r#"{{"prompt": [{user}], "chosen": [{answer}], "rejected": [{}]}}"#,
                answer.replace("\"b\"", "\"c\", \"train\": false")
            ),
            "field `rejected`: ",
        ),
        (format!(r#"{{"chosen": [{answer}], "rejected": 3}}"#), "`rejected` is a number"),
        (
            format!(
                r#"{{"prompt": "a", "chosen": [{answer}], "rejected": [{}]}}"#,
                answer.replace("\"b\"", "\"c\"")
            ),
            "`prompt` is a string, and both answers are lists of messages; give all",
        ),
    ] {
        let error = refuse(&content);
        assert!(error.contains("line 1: ") && error.contains(said), "{content}: {error}");
    }
    let error = open(folder.path(), "a.csv", "text\na\n", 64, TooLong::default()).unwrap_err().to_string();
    assert!(error.ends_with("but text; a pair has `chosen` and `rejected`"), "{error}");
    let tokenizer = Tokenizer::bytes().unwrap();
    let config = DataConfig { tokenizer: Some(&tokenizer), ..DataConfig::default() };
    let path = folder.path().join("a.jsonl");
    fs::write(&path, r#"{"chosen": "a", "rejected": "b"}"#).unwrap();
    let error = Data::open(&[path.display().to_string().parse().unwrap()], &config).unwrap_err().to_string();
    assert!(error.contains("it is a pair of answers: `prefer` trains on those"), "{error}");
    // Messages whose text is equal.
    let other = answer.replace("\"b\"", "\"b\", \"name\": \"x\"");
    let error = refuse(&format!(r#"{{"prompt": [{user}], "chosen": [{answer}], "rejected": [{other}]}}"#));
    assert!(error.contains("a pair: the rejected answer is of the same tokens"), "{error}");
}
